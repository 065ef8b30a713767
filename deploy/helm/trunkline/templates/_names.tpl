{{- define "trunkline.labels" -}}
app.kubernetes.io/name: trunkline
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "trunkline.gateway" -}}
{{ include "trunkline.labels" . }}
app.kubernetes.io/component: gateway
{{- end }}

{{- define "trunkline.nats" -}}
{{ include "trunkline.labels" . }}
app.kubernetes.io/component: registry
{{- end }}

{{/* Of the headless service of workers, whose EndpointSlices the gateways follow. */}}
{{- define "trunkline.workersService" -}}
{{ include "trunkline.labels" . }}
app.kubernetes.io/component: workers
{{- end }}

{{- define "trunkline.natsServers" -}}
{{- if .Values.nats.enabled -}}
{{- $name := printf "%s-nats" .Release.Name -}}
nats://gateway:$(NATS_PASSWORD)@{{ $name }}-0.{{ $name }}:4222,nats://gateway:$(NATS_PASSWORD)@{{ $name }}-1.{{ $name }}:4222,nats://gateway:$(NATS_PASSWORD)@{{ $name }}-2.{{ $name }}:4222
{{- else -}}
{{- range $index, $server := .Values.nats.servers -}}
{{- if $index }},{{ end }}nats://gateway:$(NATS_PASSWORD)@{{ $server }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "trunkline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "trunkline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
