//! Every metric: name, unit, labels, what it means, and what it shows of a snapshot. Nothing else is emitted, and
//! `docs/metrics.md` is held to it by a test.

use std::borrow::Cow;

use strum::{IntoStaticStr, VariantArray};
use tessera_agent::front_end::Call;
use tessera_arbiter::View;
use tessera_arbiter::policy::Cause;
use tessera_model::health::State;
use tessera_model::record::State as Life;
use tessera_region::abi;
use tessera_view::status::{Allocation, Health, Registration};

use super::running_totals::Figure::*;
use super::snapshot::{Sample, Snapshot, Value, by, one, replicas};

/// What kind of metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
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

impl MetricKind {
    fn suffix(self) -> &'static str {
        match self {
            MetricKind::Counter => "_total",
            MetricKind::Info => "_info",
            MetricKind::Gauge | MetricKind::Histogram => "",
        }
    }
}

/// A metric.
#[derive(Clone, Copy, Debug)]
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
    /// Its series.
    pub(super) read: fn(&Snapshot) -> Vec<Sample<'_>>,
}

impl Family {
    /// As it is called in a query; a histogram's series have `_bucket`, `_sum` and `_count` behind that.
    pub fn name(&self) -> String {
        let unit = if self.unit.is_empty() { "" } else { "_" };
        [self.base, unit, self.unit, self.kind.suffix()].concat()
    }
}

/// A container's, of one of its allocations: it may have several, also of one GPU. `gpu` and `uuid` are empty where a
/// figure is not known by GPU and the allocation has several.
const CONTAINER: &[&str] = &["namespace", "pod", "container", "gpu", "uuid", "allocation"];
const GPU: &[&str] = &["gpu", "uuid"];
const NONE: &[&str] = &[];

macro_rules! families {
    ($($base:literal $unit:literal $kind:ident $labels:expr, $help:literal, $read:expr;)*) => {
        /// All of them, in the order in which they are emitted.
        pub const ALL: &[Family] = &[$(Family {
            base: $base, unit: $unit, kind: MetricKind::$kind, labels: $labels, help: $help, read: $read,
        }),*];
    };
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

fn unix_seconds(unix_ms: i64) -> f64 {
    unix_ms as f64 / 1000.0
}

families! {
    "tessera_container" "" Info
        &["namespace", "pod", "container", "gpu", "uuid", "allocation", "resource", "policy", "claim"],
        "Which allocation a container has, of which resource or by which claim, and what its share of GPU time means",
        |s| s.containers_with(|one| {
            let policy = one.allocation.gpus.first().map_or("", |used| used.policy.into_str());
            let claim = one.allocation.claim.as_ref().map_or("", |claim| &claim.name);
            let labels = [one.allocation.resource_name.as_str(), policy, claim];
            (labels.map(Cow::Borrowed).into(), 1u64.into())
        });
    "tessera_container_memory_used" "bytes" Gauge CONTAINER,
        "Device memory that counts against the container's limit: charges and observed overhead",
        |s| s.bytes(|one, used| one.is_read.then_some(used.memory_used_bytes));
    "tessera_container_memory_limit" "bytes" Gauge CONTAINER,
        "Device memory that the container may hold",
        |s| s.bytes(|_, used| Some(used.memory_limit_bytes));
    "tessera_container_memory_peak" "bytes" Gauge CONTAINER,
        "Most device memory that any one of its processes was granted",
        |s| s.bytes(|one, used| one.is_read.then_some(used.memory_peak_bytes));
    "tessera_container_memory_overhead" "bytes" Gauge CONTAINER,
        "Observed overhead: device memory that its processes hold beyond their charges; part of what is used",
        |s| s.bytes(|_, used| Some(used.memory_overhead_bytes));
    "tessera_container_memory_nvml" "bytes" Gauge CONTAINER,
        "Device memory of its processes by the driver's last account; absent where the driver withholds it",
        |s| s.bytes(|_, used| used.memory_nvml_bytes);
    "tessera_container_cores" "ratio" Gauge CONTAINER,
        "The container's share of the GPU's time",
        |s| s.uses(|_, used| f64::from(used.cores_millis) / 1000.0);
    "tessera_container_gpu" "seconds" Counter CONTAINER,
        "GPU time that the container had leased, by the arbiter's clock; a container of several GPUs has them together",
        |s| s.uses(|one, _| one.compute().map(|_| seconds(one.totals.of(Leased))));
    "tessera_container_gpu_used" "seconds" Counter CONTAINER,
        "GPU time in which the container's work ran; absent where nobody can tell. Of a container that is alone the driver is asked every ten seconds",
        |s| s.uses(|one, _| {
            let is_known = one.compute().is_some_and(|compute| compute.used_10s_millis.is_some());
            is_known.then(|| seconds(one.totals.of(Used)))
        });
    "tessera_container_gate_wait" "seconds" Counter CONTAINER,
        "Time that the container waited for the GPU, by the arbiter's clock",
        |s| s.containers(|one| one.compute().map(|_| seconds(one.totals.of(Waited))));
    "tessera_container_gate_waiting" "seconds" Gauge CONTAINER,
        "How long the container has now waited for the GPU; 0 where it does not wait",
        |s| s.containers(|one| {
            one.compute().map(|compute| seconds(compute.waiting_us.unwrap_or(0)))
        });
    "tessera_container_leases" "" Counter CONTAINER,
        "Leases of the GPU that the container got",
        |s| s.containers(|one| one.totals.of(Leases));
    "tessera_container_lease_overlaps" "" Counter CONTAINER,
        "Leases after which the container drained so late that another ran beside it",
        |s| s.containers(|one| one.totals.of(Overlaps));
    "tessera_container_out_of_memory" "" Counter CONTAINER,
        "Requests for memory refused because of the container's limit",
        |s| s.containers(|one| one.totals.of(Refusals));
    "tessera_container_driver_refusals" "" Counter CONTAINER,
        "Requests for memory within the limit that the driver refused",
        |s| s.containers(|one| one.totals.of(DriverRefusals));
    "tessera_container_launches" "" Counter CONTAINER,
        "Kernels and graphs launched",
        |s| s.containers(|one| one.totals.of(Launches));
    "tessera_container_delayed_launches" "" Counter CONTAINER,
        "Launches that waited at the gate",
        |s| s.containers(|one| one.totals.of(GateWaits));
    "tessera_container_self_rationed" "" Counter CONTAINER,
        "Times that a process rationed itself, because the arbiter was silent",
        |s| s.containers(|one| one.totals.of(GateTimeouts));
    "tessera_container_tamperings" "" Counter CONTAINER,
        "Times that the container's usage page was found tampered with",
        |s| s.containers(|one| one.totals.of(Tamperings));
    "tessera_container_unaccounted_memory_findings" "" Counter CONTAINER,
        "Times that the container was found to hold device memory outside its account",
        |s| s.containers(|one| one.totals.of(Unaccounted));
    "tessera_container_idle" "seconds" Gauge CONTAINER,
        "How long the container has had no work on a GPU, as scrapes see it: no launch, no GPU time, no waiting for it",
        |s| s.containers(|one| one.totals.idle.as_secs_f64());
    "tessera_container_processes" "" Gauge CONTAINER,
        "Processes of the container that use CUDA now",
        |s| s.containers(|one| one.is_read.then_some(one.allocation.processes.len()));

    "tessera_gpu" "" Info &["gpu", "uuid", "name", "pci_bus_id", "numa_node"],
        "Product, PCI address and NUMA node of a GPU or MIG instance",
        |s| s.gpus_with(|gpu| {
            let numa = gpu.numa_node.map_or_else(String::new, |node| node.to_string());
            let labels = [gpu.name.as_str(), &gpu.pci_bus_id].map(Cow::Borrowed);
            vec![(labels.into_iter().chain([numa.into()]).collect(), 1u64.into())]
        });
    "tessera_gpu_memory_total" "bytes" Gauge GPU,
        "Memory on the device",
        |s| s.gpus(|gpu| gpu.memory_total_bytes);
    "tessera_gpu_memory_used" "bytes" Gauge GPU,
        "Memory in use by the driver's account, by containers and others",
        |s| s.gpus(|gpu| gpu.memory_used_bytes);
    "tessera_gpu_memory_reserved" "bytes" Gauge GPU,
        "Memory that is never sold",
        |s| s.gpus(|gpu| gpu.memory_reserve_bytes);
    "tessera_gpu_memory_sold" "bytes" Gauge GPU,
        "Sum of the limits of live allocations",
        |s| s.gpus(|gpu| gpu.memory_limits_bytes);
    "tessera_gpu_memory_charged" "bytes" Gauge GPU,
        "Sum of the charges of live allocations",
        |s| s.gpus(|gpu| gpu.memory_charged_bytes.min(gpu.memory_total_bytes));
    "tessera_gpu_memory_outside" "bytes" Gauge GPU,
        "Memory of processes outside Tessera's containers, by the driver's last account; no series where none was taken: a GPU without a share in use",
        |s| s.gpus(|gpu| s.outside(gpu).map(|outside| outside.bytes));
    "tessera_gpu_strangers" "" Gauge GPU,
        "Processes without a share that use the GPU, as two looks agree; no series where nobody looks, or the host's pids are hidden",
        |s| s.gpus(|gpu| s.outside(gpu).and_then(|outside| outside.strangers));
    "tessera_gpu_context_overhead" "bytes" Gauge &["gpu", "uuid", "source"],
        "Charge of new containers for each CUDA context, and its source: configured, formula or default",
        |s| s.gpus_with(|gpu| {
            let source = gpu.context_overhead_source.as_str().into();
            vec![(vec![source], gpu.context_overhead_bytes.into())]
        });
    "tessera_gpu_cores_sold" "ratio" Gauge GPU,
        "Sum of the shares of the GPU's time of live allocations",
        |s| s.gpus(|gpu| f64::from(gpu.cores_millis) / 1000.0);
    "tessera_gpu_health" "" Gauge &["gpu", "uuid", "state"],
        "1 for the state that the GPU is in, 0 for the others: healthy, suspect, unhealthy, recovering. A GPU that is left out because it does not answer is unhealthy, its uuid empty if NVML does not tell it",
        |s| s.all_gpus(|gpu| {
            let is = |state: State| (vec![state.into_str().into()], (gpu.state == state).into());
            [State::Healthy, State::Suspect, State::Unhealthy, State::Recovering].map(is).into()
        });
    "tessera_gpu_available" "" Gauge GPU,
        "Whether more of the GPU may be allocated: it is healthy, not cordoned, and no other plugin advertises it",
        |s| s.all_gpus(|gpu| {
            let is_sold = gpu.health == Health::Healthy && gpu.cordon.is_empty();
            vec![(Vec::new(), is_sold.into())]
        });
    "tessera_gpu_cordoned" "" Gauge GPU,
        "Whether the GPU is cordoned (`tessera cordon`): no more of it is allocated",
        |s| s.gpus(|gpu| !gpu.cordon.is_empty());
    "tessera_gpu_replicas" "" Gauge &["gpu", "uuid", "resource", "state"],
        "Replicas by state: free, held, or unhealthy (not held and not allocatable)",
        |s| s.gpus_with(replicas);
    "tessera_gpu_lease_held" "" Gauge GPU,
        "Whether a container holds the lease of the GPU's time; no container that shares it, no series",
        |s| s.leases(|gpu| !gpu.lease_holder.is_empty());
    "tessera_gpu_lease_waiting" "" Gauge GPU,
        "Containers that wait for the lease",
        |s| s.leases(|gpu| gpu.lease_waiting);
    "tessera_gpu_lease_quantum" "seconds" Gauge GPU,
        "How long a lease lasts now",
        |s| s.leases(|gpu| seconds(gpu.lease_quantum_us));
    "tessera_gpu_idle_while_wanted" "seconds" Counter &["gpu", "uuid", "cause"],
        "Time that the GPU was idle while a container waited for it: hand_over, idle_report, no_cpu, drain, bucket or gang (docs/internals/compute.md)",
        |s| s.gpus_with(|gpu| {
            let idle = s.arbiter().and_then(|arbiter| arbiter.idle.get(&gpu.uuid));
            let causes = Cause::VARIANTS.iter().zip(idle.into_iter().flatten());
            causes.map(|(cause, ns)| (vec![cause.into_str().into()], (*ns as f64 / 1e9).into())).collect()
        });

    "tessera_build" "" Info &["version", "page_abi"],
        "The plugin's version, and that of its pages",
        |s| {
            let version = s.status().plugin.version.as_str();
            vec![Sample::of(vec![version.into(), abi::version().to_string().into()], 1u64)]
        };
    "tessera_ready" "" Gauge NONE,
        "Whether every advertised resource is registered and watched by kubelet, as /readyz reports",
        |s| one(s.view.amiss().is_empty());
    "tessera_kubelet_registered" "" Gauge &["resource"],
        "Whether a resource is registered and watched by kubelet",
        |s| s.resources(|resource| resource.registration == Registration::Live);
    "tessera_kubelet_registrations" "" Counter &["resource"],
        "Registrations that kubelet accepted",
        |s| s.resources(|resource| resource.registrations);
    "tessera_allocate_duration" "seconds" Histogram &["resource", "outcome"],
        "How long Allocate took: ok, refused (by the request) or failed",
        |s| s.calls(Call::Allocate);
    "tessera_pre_start_duration" "seconds" Histogram &["resource", "outcome"],
        "How long PreStartContainer took, likewise",
        |s| s.calls(Call::PreStart);
    "tessera_dra_registered" "" Gauge NONE,
        "Whether kubelet has registered the DRA driver; no series of the DRA driver where there is none",
        |s| one(s.dra(|dra| dra.registered));
    "tessera_dra_published" "" Gauge NONE,
        "Whether the API server has the ResourceSlices that it should",
        |s| one(s.dra(|dra| dra.publication == "published"));
    "tessera_dra_devices" "" Gauge NONE,
        "Devices in the ResourceSlices",
        |s| one(s.dra(|dra| dra.devices));
    "tessera_dra_slice_writes" "" Counter NONE,
        "Requests that changed ResourceSlices",
        |s| one(s.dra(|dra| dra.writes));
    "tessera_dra_slice_wipes" "" Counter NONE,
        "Times that another than the driver removed ResourceSlices",
        |s| one(s.dra(|dra| dra.wipes));
    "tessera_dra_claims_prepared" "" Gauge NONE,
        "Claims that have a share of this node prepared",
        |s| one(s.dra(|dra| dra.claims));
    "tessera_dra_prepare_duration" "seconds" Histogram &["resource", "outcome"],
        "How long it took to prepare one claim: ok, refused (by the claim) or failed; the resource is the driver's name",
        |s| s.calls(Call::Prepare);
    "tessera_dra_unprepare_duration" "seconds" Histogram &["resource", "outcome"],
        "How long it took to unprepare one claim, likewise",
        |s| s.calls(Call::Unprepare);
    "tessera_allocations" "" Gauge &["state"],
        "Allocations: allocated (no container has started yet), started, or parked (its replicas went to a newer one)",
        |s| {
            let count = |state: Life| s.status().allocations.iter().filter(|one| one.state == state).count();
            by([Life::Allocated, Life::Started, Life::Parked].map(|state| (state.into_str(), count(state))))
        };
    "tessera_allocations_unnamed" "" Gauge NONE,
        "Allocations, not parked, whose pod kubelet has not named yet; they have no container series",
        |s| {
            let unnamed = |one: &&Allocation| one.holder.is_none() && one.state != Life::Parked;
            one(s.status().allocations.iter().filter(unnamed).count())
        };
    "tessera_allocations_adopted" "" Gauge NONE,
        "Allocations that the plugin's start found by their pages alone, because their records were lost",
        |s| one(s.agent().map(|agent| agent.allocations.adopted));
    "tessera_warnings" "" Gauge NONE,
        "Warnings that `tessera status` shows",
        |s| one(s.status().warnings.len());
    "tessera_findings" "" Counter &["finding"],
        "Findings about the use of the GPUs: bypass, unaccounted, stranger, usage_page, mount (docs/trust.md)",
        |s| {
            let findings = s.agent().into_iter().flat_map(|agent| agent.trust.counts());
            by(findings.map(|(kind, count)| (kind.into_str(), count)))
        };
    "tessera_ledger_commits" "" Counter &["outcome"],
        "Transactions of the durable record: ok or failed",
        |s| {
            let commits = s.agent().map(|agent| agent.journal.commits.counts());
            by(commits.into_iter().flat_map(|(ok, failed)| [("ok", ok), ("failed", failed)]))
        };
    "tessera_kubernetes_events" "" Counter &["outcome"],
        "Kubernetes events on pods: requests that the API server accepted (sent) or not (failed), and events given up (dropped)",
        |s| by(s.agent().into_iter().flat_map(|agent| agent.trust.events.all()));
    "tessera_api_listening" "" Gauge NONE,
        "Whether the JSON API is served over TCP; no series where it is not to be",
        |s| one(s.view.api.get().and_then(|api| api.listening()));
    "tessera_api_requests" "" Counter &["code"],
        "Answers of the JSON API over TCP, by HTTP status",
        |s| {
            let api = s.view.api.get().into_iter().filter(|api| api.listening().is_some());
            let requests = api.flat_map(|api| api.requests());
            requests.map(|(code, count)| Sample::of(vec![code.to_string().into()], count)).collect()
        };
    "tessera_api_reviews" "" Counter &["review", "outcome"],
        "Questions to the API server about a reader's token or access: ok, refused, or unreachable (no answer, or not allowed to ask); no series where it is not asked",
        |s| {
            let reviews = s.view.api.get().into_iter().flat_map(|api| api.reviews());
            let sample = |(review, outcome, count): (&'static str, &'static str, u64)| {
                Sample::of(vec![review.into(), outcome.into()], count)
            };
            reviews.map(sample).collect()
        };
    "tessera_history_writing" "" Gauge NONE,
        "Whether the history could last be stored; no series where it is off",
        |s| one(s.view.board.facts().history_writing);
    "tessera_config_reloads" "" Counter &["outcome"],
        "Reloads of the configuration: ok, or refused, so that the last good one stayed",
        |s| {
            let counts = s.reloads().map(|(taken, state)| [("ok", taken), ("refused", state.refused)]);
            by(counts.into_iter().flatten())
        };
    "tessera_config_last_reload_successful" "" Gauge NONE,
        "Whether the last reload of the configuration was accepted; 1 before the first",
        |s| one(s.reloads().map(|(_, state)| state.errors.is_empty()));
    "tessera_config_last_reload_success_timestamp" "seconds" Gauge NONE,
        "When the configuration in force was read, Unix time",
        |s| one(s.reloads().map(|(_, state)| unix_seconds(state.succeeded_unix_ms)));
    "tessera_arbiter_up" "" Gauge NONE,
        "Whether the arbiter's thread answers",
        |s| one(s.arbiter().is_some());
    "tessera_arbiter_turn_duration" "seconds" Histogram NONE,
        "From a container's message to the gate words that follow: the arbiter's part of a hand-over",
        |s| {
            let turns = |arbiter: &View| {
                let buckets = arbiter.turns.buckets().collect();
                Value::Histogram(buckets, arbiter.turns.sum_ns as f64 / 1e9)
            };
            one(s.arbiter().map(turns))
        };
    "tessera_arbiter_gate_writes" "" Counter NONE,
        "Gate words written",
        |s| one(s.arbiter().map(|arbiter| arbiter.commands));

    "process_cpu" "seconds" Counter NONE,
        "CPU time of the plugin",
        |s| one(s.process.cpu_seconds);
    "process_resident_memory" "bytes" Gauge NONE,
        "Memory of the plugin in RAM",
        |s| one(s.process.resident_bytes);
    "process_virtual_memory" "bytes" Gauge NONE,
        "Address space of the plugin",
        |s| one(s.process.virtual_bytes);
    "process_threads" "" Gauge NONE,
        "Threads of the plugin",
        |s| one(s.process.threads);
    "process_open_fds" "" Gauge NONE,
        "File descriptors that the plugin has open",
        |s| one(s.process.open_fds);
    "process_max_fds" "" Gauge NONE,
        "File descriptors that the plugin may have open",
        |s| one(s.process.max_fds);
    "process_start_time" "seconds" Gauge NONE,
        "When the plugin started, Unix time",
        |s| one(unix_seconds(s.view.started_unix_ms));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Prometheus' rules for names.
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
