{{/*
A probe's action: list ROOT "live" or "ready". What restarts the plugin goes over the admin socket, in the container:
no pod reaches that, however it floods the network. Readiness, by which nothing is restarted, is asked for where
Prometheus asks; but kubelet asks at the pod's address, and where the plugin listens on another it is out of reach.
*/}}
{{- define "tessera.probe" -}}
{{- $root := index . 0 -}}
{{- $what := index . 1 -}}
{{- if and $root.Values.metrics.enabled (not $root.Values.metrics.address) (eq $what "ready") -}}
httpGet: {path: /readyz, port: metrics}
{{- else -}}
exec: {command: [tessera, status, --{{ $what }}]}
{{- end -}}
{{- end -}}

{{/*
The AppArmor profile as the field that Kubernetes has had since 1.30; empty for a cluster before that, which
takes an annotation for each container. Kubernetes 1.30 is also the first with ValidatingAdmissionPolicy v1.
*/}}
{{- define "tessera.appArmor" -}}
{{- $profile := .Values.appArmorProfile -}}
{{- if and $profile (include "tessera.has" (list . "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy")) -}}
{{- if eq $profile "unconfined" -}}
{type: Unconfined}
{{- else if eq $profile "runtime/default" -}}
{type: RuntimeDefault}
{{- else -}}
{type: Localhost, localhostProfile: {{ trimPrefix "localhost/" $profile | quote }}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The plugin's container. */}}
{{- define "tessera.securityContext" -}}
runAsUser: 0 # owner of kubelet's sockets
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- with .Values.seLinuxOptions }}
seLinuxOptions: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
Kubelet's directory for device plugins: below kubeletRoot it is not, since kubelet has the path compiled in, whatever its
--root-dir. A configuration may name the one of a kubelet that was built with another.
*/}}
{{- define "tessera.devicePlugins" -}}
{{- dig "paths" "kubelet" "" . | default "/var/lib/kubelet/device-plugins" -}}
{{- end -}}

{{/* Host directory of the CDI specs that a configuration names. */}}
{{- define "tessera.cdi" -}}
{{- dig "cdi" "directory" "" . | default "/var/run/cdi" -}}
{{- end -}}

{{/* Host directories of the driver that the configuration names, as a JSON array. */}}
{{- define "tessera.driverPaths" -}}
{{- $driver := get . "driver" | default dict -}}
{{- $paths := list -}}
{{- range list (get $driver "root") (get $driver "libraries") -}}
{{- if and . (ne . "/") -}}{{- $paths = append $paths . -}}{{- end -}}
{{- end -}}
{{- $paths | toJson -}}
{{- end -}}

{{/* On which nodes a profile runs: dict "root" $ "name" NAME "profile" PROFILE "entry" ITS OWN VALUES. */}}
{{- define "tessera.placement" -}}
{{- $selector := .profile.nodeSelector | default dict -}}
{{- $own := or (get .entry "nodeSelector") (get .entry "affinity") -}}
{{- if and (ne .name "default") (not $own) -}}
{{- $selector = set (deepCopy $selector) "tessera.dev/profile" .name -}}
{{- end -}}
{{- with $selector -}}
nodeSelector: {{- toYaml . | nindent 2 }}
{{ end -}}
{{- $others := list -}}
{{- range $other, $entry := .root.Values.profiles -}}
{{- if and (ne $other $.name) (not (kindIs "invalid" $entry)) -}}{{- $others = append $others $other -}}{{- end -}}
{{- end -}}
{{- $affinity := deepCopy (.profile.affinity | default dict) -}}
{{- if not $affinity -}}
{{- $expressions := list (dict "key" "tessera.dev/gpu.present" "operator" "NotIn" "values" (list "false")) -}}
{{- if and (eq .name "default") $others -}}
{{- $expressions = append $expressions (dict "key" "tessera.dev/profile" "operator" "NotIn" "values" $others) -}}
{{- end -}}
{{- $terms := list -}}
{{- range .profile.gpuNodeLabels -}}
{{- $expression := dict "key" . "operator" "In" "values" (list "true") -}}
{{- $terms = append $terms (dict "matchExpressions" (concat (list $expression) $expressions)) -}}
{{- end -}}
{{- $terms = $terms | default (list (dict "matchExpressions" $expressions)) -}}
{{- $affinity = dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms)) -}}
{{- end -}}
{{- if and $others (not (hasKey $affinity "podAntiAffinity")) -}}
{{- $expressions := list
      (dict "key" "app.kubernetes.io/name" "operator" "In" "values" (list (include "tessera.name" .root)))
      (dict "key" "tessera.dev/profile" "operator" "In" "values" $others) -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchExpressions" $expressions) -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- end -}}
{{- with $affinity -}}
affinity: {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}
