{{/* Name of everything that belongs to the release's Prometheus. */}}
{{- define "sixfold.prometheus" -}}
{{ include "sixfold.fullname" . }}-prometheus
{{- end -}}

{{- define "sixfold.prometheusSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: prometheus
{{- end -}}

{{- define "sixfold.prometheusLabels" -}}
{{ include "sixfold.prometheusSelector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Where the operator asks; empty for nowhere. */}}
{{- define "sixfold.prometheusUrl" -}}
{{- if .Values.prometheus.enabled -}}
http://{{ include "sixfold.prometheus" . }}.{{ .Release.Namespace }}.svc:9090
{{- else -}}
{{ .Values.prometheus.url }}
{{- end -}}
{{- end -}}

{{- define "sixfold.prometheusConf" -}}
global:
  scrape_interval: {{ .Values.prometheus.scrapeInterval }}
  evaluation_interval: {{ .Values.prometheus.scrapeInterval }}
rule_files: [/etc/sixfold-prometheus/rules.yaml]
{{- with .Values.prometheus.alertmanagers }}
alerting:
  alertmanagers:
    - static_configs:
        - targets: {{ toJson . }}
{{- end }}
scrape_configs:
  - job_name: sixfold-pods
    kubernetes_sd_configs:
      - role: pod
        {{- with .Values.watchNamespaces }}
        namespaces:
          names: {{ toJson . }}
        {{- end }}
        selectors:
          - role: pod
            label: sixfold.dev/policy
    relabel_configs:
      {{- include "sixfold.podRelabelings" . | nindent 6 }}
    # A pod says itself whose it is; what the cluster says is the same and can't be made up.
    metric_relabel_configs:
      - regex: exported_(namespace|policy)
        action: labeldrop
  - job_name: sixfold-operator
    # Its series are about policies: they keep the policies' namespaces.
    honor_labels: true
    kubernetes_sd_configs:
      - role: pod
        namespaces:
          names: [{{ .Release.Namespace }}]
        selectors:
          - role: pod
            label: {{ include "sixfold.selector" . | fromYaml | include "sixfold.labelSelector" }}
    relabel_configs:
      - source_labels: [__meta_kubernetes_pod_container_port_name]
        regex: metrics
        action: keep
      - source_labels: [__meta_kubernetes_pod_name]
        target_label: pod
{{- with .Values.prometheus.extraScrapeConfigs }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- end -}}

{{/* Labels as a selector in one line: a=b,c=d */}}
{{- define "sixfold.labelSelector" -}}
{{- $terms := list -}}
{{- range $name, $value := . }}{{ $terms = append $terms (printf "%s=%s" $name $value) }}{{ end -}}
{{ join "," $terms }}
{{- end -}}

{{/* Which pods of policies are scraped, at which port, and the labels of their series. */}}
{{- define "sixfold.podRelabelings" -}}
- source_labels: [__meta_kubernetes_pod_phase]
  regex: Succeeded|Failed
  action: drop
- source_labels: [__meta_kubernetes_pod_label_sixfold_dev_component, __meta_kubernetes_pod_container_port_number]
  regex: gateway;8000|(engine|classifier);8001
  action: keep
- source_labels: [__meta_kubernetes_namespace]
  target_label: namespace
- source_labels: [__meta_kubernetes_pod_label_sixfold_dev_policy]
  target_label: policy
- source_labels: [__meta_kubernetes_pod_label_sixfold_dev_component]
  target_label: component
- source_labels: [__meta_kubernetes_pod_name]
  target_label: pod
{{- end -}}
