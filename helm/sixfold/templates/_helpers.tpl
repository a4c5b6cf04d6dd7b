{{/* Name of everything that belongs to the operator of this release. */}}
{{- define "sixfold.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "sixfold.operator" -}}
{{ include "sixfold.fullname" . }}-operator
{{- end -}}

{{- define "sixfold.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "sixfold.operator" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{/* What selects the operator's pod: nothing here may ever change, a Deployment's selector is immutable. */}}
{{- define "sixfold.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "sixfold.labels" -}}
{{ include "sixfold.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Name of everything that belongs to the release's Redis, its Secrets in other namespaces too. */}}
{{- define "sixfold.redis" -}}
{{ include "sixfold.fullname" . }}-redis
{{- end -}}

{{- define "sixfold.redisSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: redis
{{- end -}}

{{- define "sixfold.redisLabels" -}}
{{ include "sixfold.redisSelector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* As the values say, else the one that the first install made up, else a new one: to be called once a rendering. */}}
{{- define "sixfold.redisPassword" -}}
{{- $old := lookup "v1" "Secret" .Release.Namespace (include "sixfold.redis" .) | default dict -}}
{{ .Values.redis.password | default (dig "data" "password" "" $old | b64dec) | default (randAlphaNum 32) }}
{{- end -}}

{{- define "sixfold.redisConf" -}}
include /etc/sixfold-redis/auth.conf
port 6379
dir /data
# A cache: what is lost is computed again.
save ""
appendonly no
maxmemory {{ .Values.redis.maxMemoryMiB }}mb
# Blocks expire, and only what expires may go before its time.
maxmemory-policy volatile-lru
lazyfree-lazy-eviction yes
lazyfree-lazy-expire yes
tcp-keepalive 60
{{- end -}}

{{/* Further signals and sinks, which the operator reads again when they change. */}}
{{- define "sixfold.control" -}}
{{ include "sixfold.fullname" . }}-control
{{- end -}}

{{- define "sixfold.alertsSecret" -}}
{{ .Values.alerts.tokenSecret.name | default (printf "%s-alerts" (include "sixfold.fullname" .)) }}
{{- end -}}

{{/* The one that the first install made up, else a new one: to be called once a rendering. */}}
{{- define "sixfold.alertsToken" -}}
{{- $old := lookup "v1" "Secret" .Release.Namespace (include "sixfold.alertsSecret" .) | default dict -}}
{{ dig "data" .Values.alerts.tokenSecret.key "" $old | b64dec | default (randAlphaNum 48) }}
{{- end -}}

{{/* An image of the values: repository:tag or repository@digest. */}}
{{- define "sixfold.image" -}}
{{- $tag := .image.tag | default .appVersion -}}
{{ .image.repository }}{{ if hasPrefix "sha256:" $tag }}@{{ else }}:{{ end }}{{ $tag }}
{{- end -}}

{{/* What the operator does, by exact kind and verb; tests/control_plane/test_rights.py holds it to that. It reads no Secrets: pods mount them by name. */}}
{{- define "sixfold.rules" -}}
- apiGroups: [sixfold.dev]
  resources: [inferencepolicies, modelvariants]
  verbs: [list, watch]
- apiGroups: [sixfold.dev]
  resources: [optimizationtickets]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [sixfold.dev]
  resources: [inferencepolicies/status, modelvariants/status, optimizationtickets/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies, ingresses]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}

{{/* NetworkPolicyPeers that may read /state and /metrics of the policies' pods: the operator, and whatever scrapes. */}}
{{- define "sixfold.observers" -}}
{{- $home := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) -}}
{{- $operator := include "sixfold.selector" . | fromYaml -}}
{{- $observers := list (dict "namespaceSelector" $home "podSelector" (dict "matchLabels" $operator)) -}}
{{- if .Values.prometheus.enabled -}}
{{- $prometheus := include "sixfold.prometheusSelector" . | fromYaml -}}
{{- $observers = append $observers (dict "namespaceSelector" $home "podSelector" (dict "matchLabels" $prometheus)) -}}
{{- end -}}
{{ concat $observers .Values.networkPolicies.scrapers | toJson }}
{{- end -}}

{{/* Files of the operator, each volume at /etc/sixfold/<name>; whole volumes, because the kubelet refreshes only those.
What isn't there yet doesn't keep the operator from starting: it says so, and takes it once it is there. */}}
{{- define "sixfold.operatorVolumes" -}}
{{- $prometheus := .Values.prometheus }}
{{- if or $prometheus.bearerTokenSecret.name $prometheus.caConfigMap.name }}
- name: prometheus
  projected:
    sources:
      {{- with $prometheus.bearerTokenSecret }}
      {{- if .name }}
      - secret:
          name: {{ .name }}
          optional: true
          items:
            - key: {{ .key }}
              path: token
      {{- end }}
      {{- end }}
      {{- with $prometheus.caConfigMap }}
      {{- if .name }}
      - configMap:
          name: {{ .name }}
          optional: true
          items:
            - key: {{ .key }}
              path: ca.crt
      {{- end }}
      {{- end }}
{{- end }}
{{- if or .Values.signals .Values.sinks }}
- name: control
  configMap:
    name: {{ include "sixfold.control" . }}
{{- end }}
{{- if .Values.sinks }}
- name: sink-secrets
  projected:
    sources:
      {{- range .Values.sinks }}
      - secret:
          name: {{ .secretRef.name }}
          optional: true
          items:
            - key: {{ .secretRef.key }}
              path: {{ .name }}
      {{- end }}
{{- end }}
{{- if .Values.alerts.enabled }}
- name: alerts
  secret:
    secretName: {{ include "sixfold.alertsSecret" . }}
    optional: true
    items:
      - key: {{ .Values.alerts.tokenSecret.key }}
        path: token
{{- end }}
{{- end -}}
