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

{{/* An image of the values: repository:tag or repository@digest. */}}
{{- define "sixfold.image" -}}
{{- $tag := .image.tag | default .appVersion -}}
{{ .image.repository }}{{ if hasPrefix "sha256:" $tag }}@{{ else }}:{{ end }}{{ $tag }}
{{- end -}}

{{/* What the operator does, by exact kind and verb. It reads no Secrets: pods mount them by name. */}}
{{- define "sixfold.rules" -}}
- apiGroups: [sixfold.dev]
  resources: [inferencepolicies, modelvariants]
  verbs: [get, list, watch]
- apiGroups: [sixfold.dev]
  resources: [inferencepolicies/status, modelvariants/status]
  verbs: [get, patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}
