//! Every metric: name, unit, labels and what it means. Whatever is emitted takes its name and labels from
//! here, and `docs/metrics.md` is held to it by a test.

use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

/// What kind of metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows, from 0 at the start of the plugin or of its subject.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts by size.
    Histogram,
    /// Always 1; its labels tell.
    Info,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// Its name without unit and suffix.
    pub base: &'static str,
    /// `bytes`, `seconds`, `ratio`, or empty.
    pub unit: &'static str,
    /// What kind.
    pub kind: MetricKind,
    /// Names of its labels; values come in this order.
    pub labels: &'static [&'static str],
    /// What it means.
    pub help: &'static str,
}

impl Family {
    /// As it is called in a query; a histogram's series have `_bucket`, `_sum` and `_count` behind that.
    pub fn name(&self) -> String {
        let mut name = self.base.to_owned();
        if !self.unit.is_empty() {
            name.push('_');
            name.push_str(self.unit);
        }
        name.push_str(match self.kind {
            MetricKind::Counter => "_total",
            MetricKind::Info => "_info",
            MetricKind::Gauge | MetricKind::Histogram => "",
        });
        name
    }

    pub(super) fn unit(&self) -> Option<Unit> {
        match self.unit {
            "" => None,
            "bytes" => Some(Unit::Bytes),
            "seconds" => Some(Unit::Seconds),
            other => Some(Unit::Other(other.to_owned())),
        }
    }

    pub(super) fn metric_type(&self) -> MetricType {
        match self.kind {
            MetricKind::Counter => MetricType::Counter,
            MetricKind::Gauge => MetricType::Gauge,
            MetricKind::Histogram => MetricType::Histogram,
            MetricKind::Info => MetricType::Info,
        }
    }
}

/// A container's, of one of its allocations: it may have several, also of one GPU. `gpu` and `uuid` are empty where a
/// figure is not known by GPU and the allocation has several.
const CONTAINER: &[&str] = &["namespace", "pod", "container", "gpu", "uuid", "allocation"];
const GPU: &[&str] = &["gpu", "uuid"];
const NONE: &[&str] = &[];

/// Declares each family once, and all of them as one list.
macro_rules! families {
    ($($(#[$section:meta])* $name:ident: $base:literal $unit:literal $kind:ident $labels:expr, $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $name: Family = Family {
                base: $base, unit: $unit, kind: MetricKind::$kind, labels: $labels, help: $help,
            };
        )*
        /// All of them, in the order in which they are emitted.
        pub const ALL: &[Family] = &[$($name),*];
    };
}

families! {
    CONTAINER_INFO: "tessera_container" "" Info
        &["namespace", "pod", "container", "gpu", "uuid", "allocation", "resource", "policy", "claim"],
        "Which allocation a container has, of which resource or by which claim, and what its share of GPU time means";
    CONTAINER_MEMORY_USED: "tessera_container_memory_used" "bytes" Gauge CONTAINER,
        "Device memory that counts against the container's limit: charges and observed overhead";
    CONTAINER_MEMORY_LIMIT: "tessera_container_memory_limit" "bytes" Gauge CONTAINER,
        "Device memory that the container may hold";
    CONTAINER_MEMORY_PEAK: "tessera_container_memory_peak" "bytes" Gauge CONTAINER,
        "Most device memory that any one of its processes was granted";
    CONTAINER_MEMORY_OVERHEAD: "tessera_container_memory_overhead" "bytes" Gauge CONTAINER,
        "Observed overhead: device memory that its processes hold beyond their charges; part of what is used";
    CONTAINER_MEMORY_NVML: "tessera_container_memory_nvml" "bytes" Gauge CONTAINER,
        "Device memory of its processes by the driver's last account; absent where the driver withholds it";
    CONTAINER_CORES: "tessera_container_cores" "ratio" Gauge CONTAINER,
        "The container's share of the GPU's time";
    CONTAINER_GPU_TIME: "tessera_container_gpu" "seconds" Counter CONTAINER,
        "GPU time that the container had leased, by the arbiter's clock; a container of several GPUs has them together";
    CONTAINER_GPU_USED: "tessera_container_gpu_used" "seconds" Counter CONTAINER,
        "GPU time in which the container's work ran; absent where nobody can tell. Of a container that is alone the driver is asked every ten seconds";
    CONTAINER_GATE_WAIT: "tessera_container_gate_wait" "seconds" Counter CONTAINER,
        "Time that the container waited for the GPU, by the arbiter's clock";
    CONTAINER_GATE_WAITING: "tessera_container_gate_waiting" "seconds" Gauge CONTAINER,
        "How long the container has now waited for the GPU; 0 where it does not wait";
    CONTAINER_LEASES: "tessera_container_leases" "" Counter CONTAINER,
        "Leases of the GPU that the container got";
    CONTAINER_OVERLAPS: "tessera_container_lease_overlaps" "" Counter CONTAINER,
        "Leases after which the container drained so late that another ran beside it";
    CONTAINER_OUT_OF_MEMORY: "tessera_container_out_of_memory" "" Counter CONTAINER,
        "Requests for memory refused because of the container's limit";
    CONTAINER_DRIVER_REFUSALS: "tessera_container_driver_refusals" "" Counter CONTAINER,
        "Requests for memory within the limit that the driver refused";
    CONTAINER_LAUNCHES: "tessera_container_launches" "" Counter CONTAINER,
        "Kernels and graphs launched";
    CONTAINER_DELAYED: "tessera_container_delayed_launches" "" Counter CONTAINER,
        "Launches that waited at the gate";
    CONTAINER_SELF_RATIONED: "tessera_container_self_rationed" "" Counter CONTAINER,
        "Times that a process rationed itself, because the arbiter was silent";
    CONTAINER_TAMPERINGS: "tessera_container_tamperings" "" Counter CONTAINER,
        "Times that the container's usage page was found tampered with";
    CONTAINER_UNACCOUNTED: "tessera_container_unaccounted_memory_findings" "" Counter CONTAINER,
        "Times that the container was found to hold device memory outside its account";
    CONTAINER_IDLE: "tessera_container_idle" "seconds" Gauge CONTAINER,
        "How long the container has had no work on a GPU, as scrapes see it: no launch, no GPU time, no waiting for it";
    CONTAINER_PROCESSES: "tessera_container_processes" "" Gauge CONTAINER,
        "Processes of the container that use CUDA now";

    GPU_INFO: "tessera_gpu" "" Info &["gpu", "uuid", "name", "pci_bus_id", "numa_node"],
        "Product, PCI address and NUMA node of a GPU or MIG instance";
    GPU_MEMORY_TOTAL: "tessera_gpu_memory_total" "bytes" Gauge GPU,
        "Memory on the device";
    GPU_MEMORY_USED: "tessera_gpu_memory_used" "bytes" Gauge GPU,
        "Memory in use by the driver's account, by containers and others";
    GPU_MEMORY_RESERVED: "tessera_gpu_memory_reserved" "bytes" Gauge GPU,
        "Memory that is never sold";
    GPU_MEMORY_SOLD: "tessera_gpu_memory_sold" "bytes" Gauge GPU,
        "Sum of the limits of live allocations";
    GPU_MEMORY_CHARGED: "tessera_gpu_memory_charged" "bytes" Gauge GPU,
        "Sum of the charges of live allocations";
    GPU_MEMORY_OUTSIDE: "tessera_gpu_memory_outside" "bytes" Gauge GPU,
        "Memory of processes outside Tessera's containers, by the driver's last account; no series where none was taken: a GPU without a share in use";
    GPU_STRANGERS: "tessera_gpu_strangers" "" Gauge GPU,
        "Processes without a share that use the GPU, as two looks agree; no series where nobody looks, or the host's pids are hidden";
    GPU_CONTEXT: "tessera_gpu_context_overhead" "bytes" Gauge &["gpu", "uuid", "source"],
        "Charge of new containers for each CUDA context, and its source: configured, measured, formula or default";
    GPU_CORES_SOLD: "tessera_gpu_cores_sold" "ratio" Gauge GPU,
        "Sum of the shares of the GPU's time of live allocations";
    GPU_HEALTH: "tessera_gpu_health" "" Gauge &["gpu", "uuid", "state"],
        "1 for the state that the GPU is in, 0 for the others: healthy, suspect, unhealthy, recovering. A GPU that is left out because it does not answer is unhealthy, its uuid empty if NVML does not tell it";
    GPU_SOLD_HERE: "tessera_gpu_available" "" Gauge GPU,
        "Whether more of the GPU may be allocated: it is healthy, not cordoned, and no other plugin advertises it";
    GPU_CORDONED: "tessera_gpu_cordoned" "" Gauge GPU,
        "Whether the GPU is cordoned (`tessera cordon`): no more of it is allocated";
    GPU_REPLICAS: "tessera_gpu_replicas" "" Gauge &["gpu", "uuid", "resource", "state"],
        "Replicas by state: free, held, or unhealthy (not held and not allocatable)";
    GPU_LEASE_HELD: "tessera_gpu_lease_held" "" Gauge GPU,
        "Whether a container holds the lease of the GPU's time; no container that shares it, no series";
    GPU_LEASE_WAITING: "tessera_gpu_lease_waiting" "" Gauge GPU,
        "Containers that wait for the lease";
    GPU_LEASE_QUANTUM: "tessera_gpu_lease_quantum" "seconds" Gauge GPU,
        "How long a lease lasts now";
    GPU_IDLE_WANTED: "tessera_gpu_idle_while_wanted" "seconds" Counter &["gpu", "uuid", "cause"],
        "Time that the GPU was idle while a container waited for it: hand_over, idle_report, no_cpu, drain, bucket or gang (docs/internals/compute.md)";

    BUILD: "tessera_build" "" Info &["version", "page_abi"],
        "The plugin's version, and that of its pages";
    READY: "tessera_ready" "" Gauge NONE,
        "Whether every advertised resource is registered and watched by kubelet, as /readyz reports";
    REGISTERED: "tessera_kubelet_registered" "" Gauge &["resource"],
        "Whether a resource is registered and watched by kubelet";
    REGISTRATIONS: "tessera_kubelet_registrations" "" Counter &["resource"],
        "Registrations that kubelet accepted";
    ALLOCATE: "tessera_allocate_duration" "seconds" Histogram &["resource", "outcome"],
        "How long Allocate took: ok, refused (by the request) or failed";
    PRE_START: "tessera_pre_start_duration" "seconds" Histogram &["resource", "outcome"],
        "How long PreStartContainer took, likewise";
    DRA_REGISTERED: "tessera_dra_registered" "" Gauge NONE,
        "Whether kubelet has registered the DRA driver; no series of the DRA driver where there is none";
    DRA_PUBLISHED: "tessera_dra_published" "" Gauge &[],
        "Whether the API server has the ResourceSlices that it should";
    DRA_DEVICES: "tessera_dra_devices" "" Gauge NONE,
        "Devices in the ResourceSlices";
    DRA_SLICE_WRITES: "tessera_dra_slice_writes" "" Counter NONE,
        "Requests that changed ResourceSlices";
    DRA_SLICE_WIPES: "tessera_dra_slice_wipes" "" Counter NONE,
        "Times that another than the driver removed ResourceSlices";
    DRA_CLAIMS: "tessera_dra_claims_prepared" "" Gauge NONE,
        "Claims that have a share of this node prepared";
    DRA_PREPARE: "tessera_dra_prepare_duration" "seconds" Histogram &["resource", "outcome"],
        "How long it took to prepare one claim: ok, refused (by the claim) or failed; the resource is the driver's name";
    DRA_UNPREPARE: "tessera_dra_unprepare_duration" "seconds" Histogram &["resource", "outcome"],
        "How long it took to unprepare one claim, likewise";
    ALLOCATIONS: "tessera_allocations" "" Gauge &["state"],
        "Allocations: allocated (no container has started yet), started, or parked (its replicas went to a newer one)";
    UNNAMED: "tessera_allocations_unnamed" "" Gauge NONE,
        "Allocations, not parked, whose pod kubelet has not named yet; they have no container series";
    ADOPTED: "tessera_allocations_adopted" "" Gauge NONE,
        "Allocations that the plugin's start found by their pages alone, because their records were lost";
    WARNINGS: "tessera_warnings" "" Gauge NONE,
        "Warnings that `tessera status` shows";
    FINDINGS: "tessera_findings" "" Counter &["finding"],
        "Findings about the use of the GPUs: bypass, unaccounted, stranger, usage_page, mount (docs/trust.md)";
    COMMITS: "tessera_ledger_commits" "" Counter &["outcome"],
        "Transactions of the durable record: ok or failed";
    EVENTS: "tessera_kubernetes_events" "" Counter &["outcome"],
        "Kubernetes events on pods: requests that the API server accepted (sent) or not (failed), and events given up (dropped)";
    API_LISTENING: "tessera_api_listening" "" Gauge NONE,
        "Whether the JSON API is served over TCP; no series where it is not to be";
    API_REQUESTS: "tessera_api_requests" "" Counter &["code"],
        "Answers of the JSON API over TCP, by HTTP status";
    API_REVIEWS: "tessera_api_reviews" "" Counter &["review", "outcome"],
        "Questions to the API server about a reader's token or access: ok, refused, or unreachable (no answer, or not allowed to ask); no series where it is not asked";
    HISTORY_WRITING: "tessera_history_writing" "" Gauge NONE,
        "Whether the history could last be stored; no series where it is off";
    RELOADS: "tessera_config_reloads" "" Counter &["outcome"],
        "Reloads of the configuration: ok, or refused, so that the last good one stayed";
    RELOAD_OK: "tessera_config_last_reload_successful" "" Gauge NONE,
        "Whether the last reload of the configuration was accepted; 1 before the first";
    RELOAD_TIME: "tessera_config_last_reload_success_timestamp" "seconds" Gauge NONE,
        "When the configuration in force was read, Unix time";
    ARBITER_UP: "tessera_arbiter_up" "" Gauge NONE,
        "Whether the arbiter's thread answers";
    ARBITER_TURNS: "tessera_arbiter_turn_duration" "seconds" Histogram NONE,
        "From a container's message to the gate words that follow: the arbiter's part of a hand-over";
    ARBITER_COMMANDS: "tessera_arbiter_gate_writes" "" Counter NONE,
        "Gate words written";

    PROCESS_CPU: "process_cpu" "seconds" Counter NONE,
        "CPU time of the plugin";
    PROCESS_RESIDENT: "process_resident_memory" "bytes" Gauge NONE,
        "Memory of the plugin in RAM";
    PROCESS_VIRTUAL: "process_virtual_memory" "bytes" Gauge NONE,
        "Address space of the plugin";
    PROCESS_THREADS: "process_threads" "" Gauge NONE,
        "Threads of the plugin";
    PROCESS_FDS: "process_open_fds" "" Gauge NONE,
        "File descriptors that the plugin has open";
    PROCESS_MAX_FDS: "process_max_fds" "" Gauge NONE,
        "File descriptors that the plugin may have open";
    PROCESS_START: "process_start_time" "seconds" Gauge NONE,
        "When the plugin started, Unix time";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The rules of Prometheus and OpenMetrics for names.
    #[test]
    fn names_are_conventional_and_unique() {
        let names: BTreeSet<String> = ALL.iter().map(Family::name).collect();
        assert_eq!(names.len(), ALL.len());
        for family in ALL {
            let name = family.name();
            assert!(name.starts_with("tessera_") || name.starts_with("process_"), "{name}");
            assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{name}");
            assert!(["", "bytes", "seconds", "ratio"].contains(&family.unit), "{name}");
            for suffix in ["_total", "_count", "_sum", "_bucket", "_info", "_created"] {
                assert!(!family.base.ends_with(suffix) || !family.unit.is_empty(), "{name}");
            }
            assert!(!family.help.is_empty() && !family.help.ends_with('.'), "{name}");
            let labels: BTreeSet<_> = family.labels.iter().collect();
            assert_eq!(labels.len(), family.labels.len(), "{name}");
        }
    }
}
