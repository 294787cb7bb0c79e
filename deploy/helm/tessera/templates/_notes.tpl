{{/*
What a configuration sells, as JSON: `lines` for the reader, `resources` of the device plugin, and whether it has `claims`.
*/}}
{{- define "tessera.sold" -}}
{{- $lines := list -}}
{{- $resources := list -}}
{{- $claims := dig "dra" "enabled" false . -}}
{{- $rest := "each GPU" -}}
{{- if $claims -}}
{{- $gpus := dig "dra" "gpus" (list "*") . -}}
{{- if has "*" $gpus -}}
{{- $lines = append $lines "all GPUs, by claims" -}}
{{- $rest = "" -}}
{{- else if $gpus -}}
{{- $lines = append $lines (printf "the GPUs %s, by claims" (join ", " $gpus)) -}}
{{- $rest = "each other GPU" -}}
{{- end -}}
{{- end -}}
{{- range get . "layout" | default list -}}
{{- if $rest -}}
{{- $shares := list -}}
{{- range get . "shares" | default list -}}
{{- $shares = append $shares (printf "%v of %s" (get . "count" | default 1) .resource) -}}
{{- $resources = append $resources .resource | uniq -}}
{{- end -}}
{{- $gpus := get . "gpus" | default list -}}
{{- $lines = append $lines (printf "%s: %s" (ternary $rest (printf "each of the GPUs %s" (join ", " $gpus)) (has "*" $gpus)) (join ", " $shares)) -}}
{{- $rest = ternary "" "each other GPU" (has "*" $gpus) -}}
{{- end -}}
{{- end -}}
{{- if $rest -}}
{{- $resource := dig "resource" "name" "tessera.dev/gpu" . -}}
{{- $lines = append $lines (printf "%s: %v of %s" $rest (dig "share" "replicas" 4 .) $resource) -}}
{{- $resources = append $resources $resource | uniq -}}
{{- end -}}
{{- dict "lines" $lines "resources" $resources "claims" $claims | toJson -}}
{{- end -}}

{{/* What the release sells where: JSON with `lines`, `resources`, `claims`, and `sets`, its DaemonSets. */}}
{{- define "tessera.offer" -}}
{{- $lines := list -}}
{{- $resources := list -}}
{{- $claims := .Values.dra.enabled -}}
{{- $sets := list -}}
{{- range $name, $entry := .Values.profiles -}}
{{- if not (kindIs "invalid" $entry) -}}
{{- $profile := include "tessera.profile" (dict "root" $ "name" $name "profile" $entry) | fromJson -}}
{{- $sets = append $sets $profile.name -}}
{{- if $profile.existingConfigMap -}}
{{- $lines = append $lines (printf "daemonset/%s: what its ConfigMap %s says" $profile.name $profile.existingConfigMap) -}}
{{- else -}}
{{- $sold := include "tessera.sold" $profile.config | fromJson -}}
{{- $lines = append $lines (printf "daemonset/%s:" $profile.name) -}}
{{- range $sold.lines -}}{{- $lines = append $lines (printf "  %s" .) -}}{{- end -}}
{{- $resources = concat $resources $sold.resources | uniq -}}
{{- if $.Values.nodeConfigs.enabled -}}
{{- range $own, $differs := $.Values.nodeConfigs.configurations -}}
{{- $sold := include "tessera.sold" (include "tessera.nodeConfig" (list $ $profile.config $own ($differs | default dict)) | fromJson) | fromJson -}}
{{- $lines = append $lines (printf "  on nodes labelled %s=%s:" $.Values.nodeConfigs.label $own) -}}
{{- range $sold.lines -}}{{- $lines = append $lines (printf "    %s" .) -}}{{- end -}}
{{- $resources = concat $resources $sold.resources | uniq -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "lines" $lines "resources" $resources "claims" $claims "sets" $sets | toJson -}}
{{- end -}}
