//! Made-up nodes and histories, for tests.

use tessera_view::gpu::{Gpu, Replicas};
use tessera_view::history::{Answer, TenantPoint, TenantSeries};
use tessera_view::node::Node;
use tessera_view::tenant::{ComputePolicy, Tenant, Use};
use tessera_view::workload;

pub const GIB: u64 = 1 << 30;
pub const MIDNIGHT: i64 = 1_795_305_600_000;
pub const HOUR: i64 = 3_600_000;

/// A node of one GPU of 80 GiB, cut into eight, with its history.
#[derive(Clone, Debug, Default)]
pub struct Made {
    pub node: Node,
    pub history: Answer,
}

/// An hour of a tenant: memory in MiB, seconds got and waited.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hour {
    pub peak_mib: u64,
    pub got: f64,
    /// The highest share of ten seconds, thousandths; less than the mean: the mean.
    pub busiest: u32,
    pub waited: f64,
    pub refusals: u64,
    pub launches: u64,
}

pub fn busy(peak_mib: u64, got: f64, waited: f64) -> Hour {
    Hour { peak_mib, got, waited, launches: 1000, ..Hour::default() }
}

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub memory_bytes: u64,
    pub cores_millis: u32,
    pub policy: ComputePolicy,
}

pub const EIGHTH: Limits =
    Limits { memory_bytes: 8 * GIB, cores_millis: 125, policy: ComputePolicy::Burst };

impl Made {
    pub fn new() -> Self {
        let replicas = |name: &str, count, gib: u64, cores_millis| Replicas {
            resource_name: format!("tessera.dev/{name}"),
            count,
            memory_limit_bytes: gib * GIB,
            cores_millis,
            ..Replicas::default()
        };
        let gpu = Gpu {
            uuid: "GPU-a".into(),
            memory_total_bytes: 80 * GIB,
            memory_reserve_bytes: GIB,
            context_overhead_bytes: 512 << 20,
            replicas: vec![replicas("gpu", 8, 8, 125), replicas("gpu-large", 1, 40, 500)],
            ..Gpu::default()
        };
        Made {
            node: Node { node: "n1".into(), gpus: vec![gpu], ..Node::default() },
            history: Answer { step_seconds: 3600, at_unix_ms: 0, ..Answer::default() },
        }
    }

    /// A live pod with these hours from [`MIDNIGHT`] on.
    pub fn pod(mut self, pod: &str, limits: Limits, hours: &[Hour]) -> Self {
        self.gone(pod, limits, hours);
        self.history.tenants.iter_mut().rev().take(1).for_each(|series| series.live = true);
        let used = Use {
            gpu_uuid: "GPU-a".into(),
            memory_limit_bytes: limits.memory_bytes,
            cores_millis: limits.cores_millis,
            policy: limits.policy,
            ..Use::default()
        };
        self.node.tenants.push(Tenant {
            id: format!("id-{pod}"),
            namespace: "team".into(),
            pod: pod.into(),
            container: "main".into(),
            workload: workload::of(pod).into(),
            resource_name: "tessera.dev/gpu".into(),
            state: "started".into(),
            gpus: vec![used],
            ..Tenant::default()
        });
        self
    }

    /// With everything so much later.
    pub fn later(mut self, ms: i64) -> Self {
        self.history.at_unix_ms += ms;
        let points = self.history.tenants.iter_mut().flat_map(|series| &mut series.points);
        points.for_each(|point| point.at_unix_ms += ms);
        self
    }

    /// The tenant that was made last, and its series.
    ///
    /// # Panics
    /// There is none.
    pub fn last(&mut self) -> (&mut Tenant, &mut TenantSeries) {
        let tenant = self.node.tenants.last_mut().expect("a live pod");
        (tenant, self.history.tenants.last_mut().expect("a pod"))
    }

    /// As [`Made::pod`], of a pod that has ended.
    pub fn gone(&mut self, pod: &str, limits: Limits, hours: &[Hour]) {
        let points: Vec<TenantPoint> = hours
            .iter()
            .zip(0..)
            .map(|(hour, i)| TenantPoint {
                at_unix_ms: MIDNIGHT + i * HOUR,
                seconds: 3600.0,
                memory_used_bytes: hour.peak_mib << 20,
                memory_peak_bytes: hour.peak_mib << 20,
                memory_limit_bytes: limits.memory_bytes,
                cores_millis: limits.cores_millis,
                got_seconds: hour.got,
                used_seconds: hour.got,
                measured_seconds: hour.got,
                used_peak_millis: hour.busiest.max(crate::sample::ceil(hour.got / 3.6)),
                waited_seconds: hour.waited,
                // As the history counts it, which does not know the policy.
                capped_seconds: if hour.got >= 3.6 * 0.95 * f64::from(limits.cores_millis) {
                    hour.waited
                } else {
                    0.0
                },
                refusals: hour.refusals,
                launches: hour.launches,
                ..TenantPoint::default()
            })
            .collect();
        let end = MIDNIGHT + HOUR * points.len() as i64;
        self.history.at_unix_ms = self.history.at_unix_ms.max(end);
        self.history.tenants.push(TenantSeries {
            id: format!("id-{pod}"),
            generation: 1,
            namespace: "team".into(),
            pod: pod.into(),
            container: "main".into(),
            workload: workload::of(pod).into(),
            gpu_uuid: "GPU-a".into(),
            live: false,
            points,
        });
    }
}
