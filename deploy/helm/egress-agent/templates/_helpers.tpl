{{- /* What objects are called: as Helm's own charts do it. */}}
{{- define "egress-agent.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "egress-agent.namespace" -}}
{{- .Values.namespace.name | default .Release.Namespace -}}
{{- end -}}

{{- define "egress-agent.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- printf "%s%s%s" .Values.image.repository (ternary "@" ":" (hasPrefix "sha256:" $tag)) $tag -}}
{{- end -}}

{{- define "egress-agent.labels" -}}
app.kubernetes.io/name: egress-agent
app.kubernetes.io/part-of: egress-agent
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "egress-agent.monitoringLabels" -}}
{{ include "egress-agent.labels" . }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "egress-agent.metricsAddress" -}}
{{- if and .Values.monitoring.enabled (not .Values.metrics.exposed) }}{{ fail "monitoring.enabled needs metrics.exposed: a PodMonitor of targets that refuse it is of no use" }}{{ end -}}
{{- if not .Values.metrics.exposed -}}127.0.0.1{{- end -}}
{{- end -}}

{{- define "egress-agent.metricsSecret" -}}
{{- .Values.metrics.tokenSecret | default "egress-agent-metrics" -}}
{{- end -}}

{{- /* The variables of agents and controllers. Those of `settings` come last. */}}
{{- define "egress-agent.settings" -}}
{{- $all := dict "EGRESS_AGENT_LOG_FORMAT" "json" -}}
{{- $_ := set $all "EGRESS_AGENT_METRICS_BIND_ADDRESS" (printf "%s:9477" (include "egress-agent.metricsAddress" .)) -}}
{{- $_ := set $all "EGRESS_AGENT_METRICS_TOKEN_FILE" "/etc/egress-agent/metrics/token" -}}
{{- with .Values.interfaces.uplink }}{{ $_ := set $all "EGRESS_AGENT_UPLINK" . }}{{ end -}}
{{- $port := required "set interfaces.managementPort: ovn-k8s-mp0, or the bridge; clusters/ has values of three kinds of cluster" .Values.interfaces.managementPort -}}
{{- $_ := set $all "EGRESS_AGENT_MGMT_PORT" $port -}}
{{- with .Values.networks.pods }}{{ $_ := set $all "EGRESS_AGENT_CLUSTER_SUBNETS" (join "," .) }}{{ end -}}
{{- with .Values.networks.services }}{{ $_ := set $all "EGRESS_AGENT_SERVICE_CIDRS" (join "," .) }}{{ end -}}
{{- if .Values.natLog.enabled -}}
{{- $_ := set $all "EGRESS_AGENT_NAT_LOG" "/var/log/egress-agent/nat.log" -}}
{{- $_ := set $all "EGRESS_AGENT_PORT_BLOCK_SIZE" (toString .Values.natLog.portBlockSize) -}}
{{- end -}}
{{- if .Values.antrea.enabled }}{{ $_ := set $all "EGRESS_AGENT_ANTREA" "true" }}{{ end -}}
{{- if .Values.cilium.enabled }}{{ $_ := set $all "EGRESS_AGENT_CILIUM" "true" }}{{ end -}}
{{- if .Values.egressRouter.controller.enabled -}}
{{- $image := .Values.egressRouter.controller.image | default (include "egress-agent.image" .) -}}
{{- $_ := set $all "EGRESS_AGENT_EGRESS_ROUTER_IMAGE" $image -}}
{{- end -}}
{{- range $variable, $value := .Values.settings }}{{ $_ := set $all $variable $value }}{{ end -}}
{{- toYaml $all -}}
{{- end -}}

{{- define "egress-agent.conf" -}}
{{- .Values.agentConf | default (.Files.Get "files/agent.conf") -}}
{{- end -}}

{{- /* Changes with either, and so replaces the pods, which read both at their start. */}}
{{- define "egress-agent.checksum" -}}
{{- printf "%s\n%s" (include "egress-agent.settings" .) (include "egress-agent.conf" .) | sha256sum -}}
{{- end -}}

{{- define "egress-agent.routerSettings" -}}
{{- $all := dict -}}
{{- with .Values.networks.pods }}{{ $_ := set $all "EGRESS_ROUTER_CLUSTER_NETWORKS" (join "," .) }}{{ end -}}
{{- with .Values.networks.services }}{{ $_ := set $all "EGRESS_ROUTER_SERVICE_NETWORKS" (join "," .) }}{{ end -}}
{{- if .Values.egressRouter.plugin.configMaps }}{{ $_ := set $all "EGRESS_ROUTER_KUBECONFIG" "true" }}{{ end -}}
{{- toYaml $all -}}
{{- end -}}
