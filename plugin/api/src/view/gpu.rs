//! A GPU, and what still fits on it.

use std::cmp::Reverse;

use tessera_rules::front_end::FrontEnd;
use tessera_view::gpu as view;
use tessera_view::status::{Gpu, Health, Replica};

pub(super) fn view(gpu: &Gpu) -> view::Gpu {
    let is_withheld = gpu.health == Health::Unhealthy && gpu.cordon.is_empty();
    let withheld = if is_withheld { gpu.health_reason.clone() } else { String::new() };
    view::Gpu {
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        name: gpu.name.clone(),
        pci_bus_id: gpu.pci_bus_id.clone(),
        numa_node: gpu.numa_node,
        state: gpu.state.name().to_owned(),
        state_reason: gpu.state_reason.clone(),
        state_since_unix_ms: gpu.state_since_unix_ms,
        state_waits_for: gpu.state_waits_for.clone(),
        cordon: gpu.cordon.clone(),
        withheld,
        front_end: gpu.front_end.clone(),
        moving: gpu.moving,
        memory_total_bytes: gpu.memory_total_bytes,
        memory_used_bytes: gpu.memory_used_bytes,
        memory_reserve_bytes: gpu.memory_reserve_bytes,
        memory_limits_bytes: gpu.memory_limits_bytes,
        memory_charged_bytes: gpu.memory_charged_bytes,
        memory_outside_bytes: gpu.memory_outside_bytes,
        context_overhead_bytes: gpu.context_overhead_bytes,
        cores_millis: gpu.cores_millis,
        left_memory_bytes: gpu.left_memory_bytes,
        left_cores_millis: gpu.left_cores_millis,
        no_room: gpu.no_room.clone(),
        default_memory_bytes: gpu.default_memory_bytes,
        default_cores_millis: gpu.default_cores_millis,
        lease: lease(gpu),
        replicas: replicas(gpu),
        fits: fits(gpu),
    }
}

/// There is a quantum where the arbiter divides its time.
fn lease(gpu: &Gpu) -> Option<view::Lease> {
    (gpu.lease_quantum_us > 0).then(|| view::Lease {
        holder: gpu.lease_holder.clone(),
        waiting: gpu.lease_waiting,
        quantum_us: gpu.lease_quantum_us,
    })
}

fn is_free(replica: &Replica) -> bool {
    replica.allocation_id.is_empty() && replica.health == Health::Healthy
}

/// One entry for each resource, in the order of the configuration.
fn replicas(gpu: &Gpu) -> Vec<view::Replicas> {
    let mut all: Vec<view::Replicas> = Vec::new();
    for replica in &gpu.replicas {
        let at = all.iter().position(|one| one.resource_name == replica.resource_name);
        let at = at.unwrap_or_else(|| {
            let resource_name = replica.resource_name.clone();
            all.push(view::Replicas { resource_name, ..view::Replicas::default() });
            all.len() - 1
        });
        let of = &mut all[at];
        of.count += 1;
        of.held += u32::from(!replica.allocation_id.is_empty());
        of.free += u32::from(is_free(replica));
        // One that is retired has no size any more.
        of.memory_limit_bytes = of.memory_limit_bytes.max(replica.memory_limit_bytes);
        of.cores_millis = of.cores_millis.max(replica.cores_millis);
    }
    all
}

/// What can be handed out now: free replicas, or for claims what is left.
fn fits(gpu: &Gpu) -> Vec<view::Fit> {
    if gpu.front_end == FrontEnd::Dra.as_str() {
        return left(gpu).into_iter().collect();
    }
    let mut fits: Vec<view::Fit> = Vec::new();
    for replica in gpu.replicas.iter().filter(|replica| is_free(replica)) {
        let same = fits.iter_mut().find(|fit| {
            fit.resource_name == replica.resource_name
                && fit.memory_bytes == replica.memory_limit_bytes
                && fit.cores_millis == replica.cores_millis
        });
        match same {
            Some(fit) => fit.count += 1,
            None => fits.push(view::Fit {
                resource_name: replica.resource_name.clone(),
                count: 1,
                memory_bytes: replica.memory_limit_bytes,
                cores_millis: replica.cores_millis,
            }),
        }
    }
    fits.sort_by_key(|fit| Reverse((fit.memory_bytes, fit.cores_millis)));
    fits
}

fn left(gpu: &Gpu) -> Option<view::Fit> {
    let is_sold = gpu.health == Health::Healthy && gpu.cordon.is_empty() && !gpu.moving;
    (is_sold && gpu.no_room.is_empty()).then(|| view::Fit {
        count: 1,
        memory_bytes: gpu.left_memory_bytes,
        cores_millis: gpu.left_cores_millis,
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replica(resource: &str, gib: u64, holder: &str, health: Health) -> Replica {
        Replica {
            resource_name: resource.into(),
            memory_limit_bytes: gib << 30,
            allocation_id: holder.into(),
            health,
            ..Replica::default()
        }
    }

    #[test]
    fn what_fits_is_what_is_free_and_healthy_the_largest_first() {
        let gpu = Gpu {
            replicas: vec![
                replica("small", 10, "", Health::Healthy),
                replica("small", 10, "", Health::Healthy),
                replica("small", 10, "held", Health::Healthy),
                replica("large", 40, "", Health::Unhealthy),
                replica("large", 40, "", Health::Healthy),
            ],
            front_end: FrontEnd::DevicePlugin.as_str().to_owned(),
            ..Gpu::default()
        };
        let seen = view(&gpu);
        let fits: Vec<_> =
            seen.fits.iter().map(|f| (&*f.resource_name, f.count, f.memory_bytes >> 30)).collect();
        assert_eq!(fits, [("large", 1, 40), ("small", 2, 10)]);
        let cut: Vec<_> =
            seen.replicas.iter().map(|r| (&*r.resource_name, r.count, r.held, r.free)).collect();
        assert_eq!(cut, [("small", 3, 1, 2), ("large", 2, 0, 1)]);
        assert_eq!(seen.lease, None);
    }

    #[test]
    fn of_a_gpu_for_claims_fits_what_is_left_while_it_is_sold() {
        let gpu = Gpu {
            front_end: FrontEnd::Dra.as_str().to_owned(),
            health: Health::Healthy,
            left_memory_bytes: 59 << 30,
            left_cores_millis: 750,
            ..Gpu::default()
        };
        let fit =
            view::Fit { count: 1, memory_bytes: 59 << 30, cores_millis: 750, ..Default::default() };
        assert_eq!(view(&gpu).fits, [fit]);
        let cordoned = Gpu { cordon: "c".into(), ..gpu.clone() };
        assert!(view(&cordoned).fits.is_empty() && view(&cordoned).withheld.is_empty());
        assert!(view(&Gpu { moving: true, ..gpu.clone() }).fits.is_empty());
        assert!(view(&Gpu { no_room: "GPU time".into(), ..gpu }).fits.is_empty());
    }
}
