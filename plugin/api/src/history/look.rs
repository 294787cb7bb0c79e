//! A survey as a look of the history.

use std::collections::HashMap;

use tessera_history::{GpuLook, Look, TenantLook, UseLook};
use tessera_view::status::{Allocation, AllocationState};

use crate::admin::Survey;

/// What of a survey is recorded. Replicas that went to another allocation have what their last processes hold, and
/// are recorded as long as there are such.
pub(super) fn of(survey: &Survey, monotonic_ms: u64) -> Look {
    let status = &survey.status;
    let memory: HashMap<&str, u64> =
        status.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.memory_total_bytes)).collect();
    // Of one that is left out because it does not answer nothing is known.
    let answering = status.gpus.iter().filter(|gpu| gpu.memory_total_bytes > 0);
    let gpus = answering.map(|gpu| GpuLook {
        uuid: gpu.uuid.clone(),
        memory_used_bytes: gpu.memory_used_bytes,
        memory_limits_bytes: gpu.memory_limits_bytes,
        healthy: gpu.state.is_sold(),
        cordoned: !gpu.cordon.is_empty(),
    });
    let tenants = status.allocations.iter().map(|one| {
        let read = !survey.unread.contains(&one.id);
        tenant(one, read, &memory)
    });
    Look {
        at_unix_ms: status.at_unix_ms,
        monotonic_ms,
        gpus: gpus.collect(),
        tenants: tenants.collect(),
    }
}

fn tenant(one: &Allocation, read: bool, memory: &HashMap<&str, u64>) -> TenantLook {
    let holder = one.holder.clone().unwrap_or_default();
    // A claim is of a namespace, whether kubelet has named its pod or not.
    let namespace = match (holder.namespace.is_empty(), &one.claim) {
        (true, Some(claim)) => claim.namespace.clone(),
        _ => holder.namespace,
    };
    let is_parked = one.state == AllocationState::Parked;
    let compute = one.compute.clone().unwrap_or_default();
    let uses = one.gpus.iter().map(|used| {
        // A page is its tenant's word: nobody holds more than there is.
        let most = memory.get(used.gpu_uuid.as_str()).copied().unwrap_or(u64::MAX);
        UseLook {
            gpu_uuid: used.gpu_uuid.clone(),
            memory_used_bytes: used.memory_used_bytes.min(most),
            process_peak_bytes: used.memory_peak_bytes.min(most),
            memory_limit_bytes: if is_parked { 0 } else { used.memory_limit_bytes },
            memory_overhead_bytes: used.memory_overhead_bytes.min(most),
            cores_millis: if is_parked { 0 } else { used.cores_millis },
        }
    });
    TenantLook {
        id: one.id.clone(),
        generation: one.generation,
        namespace,
        pod: holder.pod,
        container: holder.container,
        read,
        uses: uses.collect(),
        unheard: one.compute.is_none(),
        leased_us: compute.leased_us,
        waited_us: compute.waited_us,
        used_us: compute.used_us,
        measured_us: compute.measured_us,
        rations: one.gate_timeouts,
        refusals: one.refusals,
        launches: one.launches,
    }
}

#[cfg(test)]
mod tests {
    use tessera_view::status::{Gpu, GpuState, Holder, Status};
    use tessera_view::tenant::{Compute, Use};

    use super::*;

    #[test]
    fn a_tenant_holds_no_more_than_its_gpu_has_and_an_unread_page_says_nothing() {
        let gpu = Gpu {
            uuid: "GPU-a".into(),
            memory_total_bytes: 100,
            memory_used_bytes: 60,
            cordon: "uid 0: tessera cordon 0".into(),
            state: GpuState::Recovering,
            ..Gpu::default()
        };
        let used = Use {
            gpu_uuid: "GPU-a".into(),
            memory_used_bytes: u64::MAX,
            memory_overhead_bytes: 7,
            memory_peak_bytes: 1 << 60,
            memory_limit_bytes: 50,
            cores_millis: 500,
            ..Use::default()
        };
        let holder = Holder { namespace: "ns".into(), pod: "p".into(), container: "c".into() };
        let one = |id: &str, state: AllocationState| Allocation {
            id: id.into(),
            generation: 3,
            state,
            holder: Some(holder.clone()),
            gpus: vec![used.clone()],
            compute: Some(Compute { leased_us: 5, waited_us: 6, ..Compute::default() }),
            launches: 9,
            ..Allocation::default()
        };
        let allocations =
            vec![one("a", AllocationState::Started), one("b", AllocationState::Parked)];
        let status = Status { gpus: vec![gpu], allocations, at_unix_ms: 77, ..Default::default() };
        let survey = Survey { status, unread: ["b".to_owned()].into(), ..Survey::default() };
        let look = of(&survey, 5);
        assert_eq!((look.at_unix_ms, look.monotonic_ms), (77, 5));
        assert!(!look.gpus[0].healthy && look.gpus[0].cordoned);
        let [a, b] = look.tenants.as_slice() else { panic!("{look:?}") };
        assert_eq!((a.pod.as_str(), a.read, a.leased_us, a.launches), ("p", true, 5, 9));
        let used = &a.uses[0];
        assert_eq!((used.memory_used_bytes, used.process_peak_bytes), (100, 100));
        assert_eq!((used.memory_limit_bytes, used.cores_millis), (50, 500));
        assert_eq!((b.read, b.uses[0].memory_limit_bytes), (false, 0));
    }
}
