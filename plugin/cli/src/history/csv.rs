//! A line for each bucket.

use tessera_model::time_format;
use tessera_view::history::Answer;

use crate::output::quoted;

/// Tenants' buckets, then GPUs'; what does not apply is empty.
pub(super) fn csv<'a>(answers: impl Iterator<Item = &'a Answer>) -> String {
    let mut out = String::from(
        "of,node,gpu_uuid,namespace,pod,container,workload,id,generation,live,at,step_seconds,seconds,\
         memory_used_bytes,memory_peak_bytes,memory_limit_bytes,memory_overhead_bytes,cores_millis,got_seconds,\
         waited_seconds,capped_seconds,rationed_seconds,refusals,launches,unhealthy_seconds,cordoned_seconds,\
         used_peak_millis,used_seconds,measured_seconds\r\n",
    );
    answers.for_each(|answer| rows(&mut out, answer));
    out
}

fn rows(out: &mut String, answer: &Answer) {
    let step = answer.step_seconds;
    for one in &answer.tenants {
        let names =
            [&one.gpu_uuid, &one.namespace, &one.pod, &one.container, &one.workload, &one.id]
                .map(|name| quoted(name))
                .join(",");
        for point in &one.points {
            out.push_str(&format!(
                "tenant,{},{names},{},{},{},{step},{:.3},{},{},{},{},{},{:.4},{:.4},{:.4},{:.4},{},{},,,{},{:.4},{:.4}\r\n",
                quoted(&answer.node),
                one.generation,
                one.live,
                time_format::rfc3339(point.at_unix_ms),
                point.seconds,
                point.memory_used_bytes,
                point.memory_peak_bytes,
                point.memory_limit_bytes,
                point.memory_overhead_bytes,
                point.cores_millis,
                point.got_seconds,
                point.waited_seconds,
                point.capped_seconds,
                point.rationed_seconds,
                point.refusals,
                point.launches,
                point.used_peak_millis,
                point.used_seconds,
                point.measured_seconds,
            ));
        }
    }
    for one in &answer.gpus {
        for point in &one.points {
            out.push_str(&format!(
                "gpu,{},{},,,,,,,,{},{step},{:.3},{},{},{},,,{:.4},,,,,,{:.3},{:.3},{},,\r\n",
                quoted(&answer.node),
                quoted(&one.gpu_uuid),
                time_format::rfc3339(point.at_unix_ms),
                point.seconds,
                point.memory_used_bytes,
                point.memory_peak_bytes,
                point.memory_limits_bytes,
                point.leased_seconds,
                point.unhealthy_seconds,
                point.cordoned_seconds,
                point.leased_peak_millis,
            ));
        }
    }
}
