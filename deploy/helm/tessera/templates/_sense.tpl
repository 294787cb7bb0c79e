{{/*
Refuses a configuration with which the plugin would not start, or for which the pod is not made: list ROOT WHERE
CONFIGURATION, as it goes to the ConfigMap. The plugin has the same rules between keys; tests compare the two.
*/}}
{{- define "tessera.sense" -}}
{{- $root := index . 0 -}}
{{- $where := index . 1 -}}
{{- $config := index . 2 -}}
{{- $known := ($root.Files.Get "files/schema.json" | fromJson).definitions.config.properties -}}
{{- range $table, $keys := dict "metrics" "metrics.enabled, metrics.address and metrics.port" "api" "api.enabled, api.address and api.port" -}}
{{- if ne (dig $table "listen" "" $config) (get (get (include "tessera.derived" $root | fromYaml) $table) "listen") -}}
{{- fail (printf "%s.%s.listen: probes, ports and policies follow the values %s; set these" $where $table $keys) -}}
{{- end -}}
{{- end -}}
{{- if and (not $root.Values.events.enabled) (ne (dig "kubernetes" "events" "" $config) "off") -}}
{{- fail (printf "%s.kubernetes.events: the plugin has no right to write events; set events.enabled: true" $where) -}}
{{- end -}}
{{- $api := get $config "api" | default dict -}}
{{- if and (eq (get $api "authorisation" | default "") "none") $root.Values.api.enabled (not (regexMatch "^(127[.][0-9.]+|\\[::1\\])$" $root.Values.api.address)) -}}
{{- fail (printf "%s.api.authorisation: with none everybody in the network could read everything; leave it out, or set api.address: 127.0.0.1 (and hostNetwork: true, so that the node's processes reach it)" $where) -}}
{{- end -}}
{{- if ne (empty (get $api "tls_cert")) (empty (get $api "tls_key")) -}}
{{- fail (printf "%s.api: tls_cert and tls_key go together; set both" $where) -}}
{{- end -}}
{{- $driver := get $config "driver" | default dict -}}
{{- if and (get $driver "root") (get $driver "libraries") -}}
{{- fail (printf "%s.driver: libraries are found below root or lie in libraries; set one" $where) -}}
{{- end -}}
{{- with dig "labels" "nfd_file" "" $config -}}
{{- if not (and $root.Values.nodeLabels.nfd (hasPrefix (printf "%s/" $root.Values.nodeLabels.directory) .)) -}}
{{- fail (printf "%s.labels.nfd_file: %s is not mounted; set nodeLabels.nfd: true and nodeLabels.directory" $where .) -}}
{{- end -}}
{{- end -}}
{{- $share := get $config "share" | default dict -}}
{{- $replicas := get $share "replicas" | default $known.share.properties.replicas.default | int64 -}}
{{- $cores := include "tessera.thousandths" (get $share "cores" | default "auto") | int64 -}}
{{- if gt (mul $cores $replicas) 1000 -}}
{{- fail (printf "%s.share.cores: %d replicas of %v are more than one GPU; lower cores or replicas" $where $replicas (get $share "cores")) -}}
{{- end -}}
{{- $memory := get $share "memory" -}}
{{- $overhead := dig "gpus" "context_overhead" $known.gpus.properties.context_overhead.default $config | toString -}}
{{- if and (has $memory (list nil "" "auto") | not) (ne $overhead "auto") -}}
{{- if le (include "tessera.bytes" $memory | int64) (include "tessera.bytes" $overhead | int64) -}}
{{- fail (printf "%s.share.memory: %v is not more than gpus.context_overhead (%v); raise the memory, or lower context_overhead" $where $memory $overhead) -}}
{{- end -}}
{{- end -}}
{{- if and (dig "dra" "enabled" false $config) (has $memory (list nil "" "auto") | not) -}}
{{- $step := dig "dra" "memory_step" $known.dra.properties.memory_step.default $config -}}
{{- if gt (include "tessera.bytes" $step | int64) (include "tessera.bytes" $memory | int64) -}}
{{- fail (printf "%s.dra.memory_step: %v is more than share.memory (%v); lower the step, or raise the share" $where $step $memory) -}}
{{- end -}}
{{- end -}}
{{- range $table, $section := $known -}}
{{- range $key, $may := get $section "properties" | default dict -}}
{{- $value := get (get $config $table | default dict) $key -}}
{{- if and (hasKey $may "exclusiveMinimum") (has $value (list nil "" "auto") | not) -}}
{{- $least := int64 $may.exclusiveMinimum | add 1 -}}
{{- $bytes := include "tessera.bytes" $value | int64 -}}
{{- if and (lt $bytes $least) (gt $least 1) -}}
{{- fail (printf "%s.%s.%s: %v is too little; it must be at least %s" $where $table $key $value (include "tessera.mebibytes" $least)) -}}
{{- end -}}
{{- with get $may "multipleOf" | int64 -}}
{{- if mod $bytes . -}}
{{- fail (printf "%s.%s.%s: %v is not a multiple of %s; write a whole number of these" $where $table $key $value (include "tessera.mebibytes" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range list
      (list "compute" "quantum_min" "quantum")
      (list "compute" "quantum" "quantum_max")
      (list "compute" "drain_min" "drain_max")
      (list "health" "recovery" "recovery_max")
      (list "history" "keep_10s" "keep_5m")
      (list "history" "keep_5m" "keep_1h") -}}
{{- $table := get $config (index . 0) | default dict -}}
{{- $keys := (get $known (index . 0)).properties -}}
{{- $short := get $table (index . 1) | default (get $keys (index . 1)).default -}}
{{- $long := get $table (index . 2) | default (get $keys (index . 2)).default -}}
{{- if gt (include "tessera.millis" $short | int64) (include "tessera.millis" $long | int64) -}}
{{- fail (printf "%s.%s: %s (%s) is longer than %s (%s)" $where (index . 0) (index . 1) $short (index . 2) $long) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A length of time in milliseconds. */}}
{{- define "tessera.millis" -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- mul (regexFind "[0-9]+" . | trimPrefix "+" | float64 | int64) (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) $unit) -}}
{{- end -}}

{{/* A quantity in whole units, rounded up; Helm has numbers as they come, also 1e+09. */}}
{{- define "tessera.bytes" -}}
{{- $text := toString . | trimPrefix "+" -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- $suffix := trimPrefix $number $text -}}
{{- $units := dict "" 1 "n" 0.000000001 "u" 0.000001 "m" 0.001 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000 "E" 1000000000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- if regexMatch "^[eE][+-]?[0-9]+$" $suffix -}}
{{- float64 $text | ceil | int64 -}}
{{- else -}}
{{- mulf $number (get $units $suffix) | ceil | int64 -}}
{{- end -}}
{{- end -}}

{{/* Bytes as one writes them. */}}
{{- define "tessera.mebibytes" -}}
{{- if mod . 1048576 -}}{{- . -}}{{- else -}}{{- div . 1048576 -}}Mi{{- end -}}
{{- end -}}

{{/* Thousandths of a GPU; 0 where this does not read it. */}}
{{- define "tessera.thousandths" -}}
{{- $text := toString . | trimPrefix "+" -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- if regexMatch "^[0-9.]+ *%+$" $text -}}
{{- mulf $number 10 | floor | int64 -}}
{{- else if regexMatch "^[0-9.]+m$" $text -}}
{{- float64 $number | ceil | int64 -}}
{{- else if regexMatch "^[0-9.]+$" $text -}}
{{- mulf $number 1000 | ceil | int64 -}}
{{- else -}}
0
{{- end -}}
{{- end -}}
