//! One snapshot of everything, as series.

mod containers;
mod gpus;
mod writer;

use std::collections::HashMap;
use std::fmt;
use std::time::Instant;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use tessera_region::abi;
use tessera_view::status::{AllocationState, Configuration, Dra, Gpu, Registration};

use gpus::{write_gpus, write_leases, write_replicas};
use writer::{Process, Writer};

use super::families::{self as f, Family};
use super::running_totals::{RunningTotals, Totals};
use crate::admin::{StatusView, Survey};
use tessera_agent::meters::{Call, Counts, Outcome};
use tessera_agent::trust;
use tessera_agent::trust::Outside;
use tessera_tenant::regions::Region;

/// A family, and what it shows of one container or GPU.
type Figure<T, V> = (&'static Family, fn(&T) -> V);

/// What is known of a GPU by its UUID.
struct Known {
    index: String,
    memory_bytes: u64,
}

type Gpus<'s> = HashMap<&'s str, Known>;

/// Everything there is to tell at one moment.
#[derive(Debug)]
pub(super) struct Snapshot {
    survey: Survey,
    /// Of each allocation, in the survey's order.
    totals: Vec<Totals>,
    ready: bool,
    started_unix_ms: i64,
    calls: Vec<(Call, Timed)>,
    /// How often the configuration was read and found good, and how it stands with it.
    reloads: Option<(u64, Configuration)>,
    commits: Option<(u64, u64)>,
    adopted: Option<u64>,
    findings: Option<[(trust::FindingKind, u64); trust::FindingKind::ALL.len()]>,
    events: Option<[(&'static str, u64); 3]>,
    /// What uses GPUs beside containers with shares, by UUID, as far as somebody has looked.
    outside: HashMap<String, Outside>,
    api: Option<std::sync::Arc<tessera_web::Counts>>,
    history_writing: Option<bool>,
    process: Process,
}

type Timed = Vec<(std::sync::Arc<str>, Outcome, Counts)>;

impl Snapshot {
    /// Looks at everything, but changes nothing and waits for no tenant. Blocking: asks the driver.
    pub fn collect(view: &StatusView, running_totals: &mut RunningTotals) -> Self {
        let survey = view.survey(&Region::try_snapshot);
        let now = Instant::now();
        let agent = view.agent();
        let adopted = agent.map_or(0, |agent| agent.allocations().adopted_until());
        let allocations = &survey.status.allocations;
        let totals = allocations
            .iter()
            .map(|allocation| {
                let readable = !survey.unread.contains(&allocation.id);
                running_totals.update(allocation, readable, allocation.generation <= adopted, now)
            })
            .collect();
        running_totals.retain(allocations);
        let calls = [Call::Allocate, Call::PreStart, Call::Prepare, Call::Unprepare];
        Snapshot {
            totals,
            ready: view.amiss().is_empty(),
            started_unix_ms: view.started_unix_ms(),
            calls: agent.map_or_else(Vec::new, |agent| {
                calls.into_iter().map(|call| (call, agent.meters().calls(call))).collect()
            }),
            reloads: agent.and(view.reloader()).map(|one| (one.taken(), one.state())),
            adopted: agent.map(|agent| agent.allocations().adopted() as u64),
            commits: agent.map(|agent| agent.journal().commits().counts()),
            findings: agent.map(|agent| agent.trust().counts()),
            events: agent.map(|agent| agent.trust().events().all()),
            outside: agent.map_or_else(HashMap::new, |agent| {
                let uuids = survey.status.gpus.iter().map(|gpu| &gpu.uuid);
                let of = |uuid: &String| Some((uuid.clone(), agent.trust().outside(uuid)?));
                uuids.filter_map(of).collect()
            }),
            api: view.api().cloned(),
            history_writing: view.board().facts().history_writing,
            process: Process::read(),
            survey,
        }
    }

    /// As OpenMetrics' text; `None` would be a bug.
    pub fn text(self) -> Option<String> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        encode(&mut text, &registry).ok()?;
        Some(text)
    }

    fn write_plugin(&self, out: &mut Writer<'_>) -> fmt::Result {
        let plugin = &self.survey.status.plugin;
        let abi = abi::version().to_string();
        out.family(&f::BUILD, |series| series.info(&[&plugin.version, &abi]))?;
        out.gauge(&f::READY, u64::from(self.ready))?;
        out.family(&f::REGISTERED, |series| {
            plugin.resources.iter().try_for_each(|resource| {
                let live = resource.registration == Registration::Live;
                series.gauge(&[&resource.name], u64::from(live))
            })
        })?;
        out.family(&f::REGISTRATIONS, |series| {
            let mut resources = plugin.resources.iter();
            resources.try_for_each(|one| series.counter(&[&one.name], one.registrations))
        })?;
        for (call, timed) in &self.calls {
            let family = match call {
                Call::Allocate => &f::ALLOCATE,
                Call::PreStart => &f::PRE_START,
                Call::Prepare => &f::DRA_PREPARE,
                Call::Unprepare => &f::DRA_UNPREPARE,
            };
            out.family(family, |series| {
                timed.iter().try_for_each(|(resource, outcome, counts)| {
                    series.histogram(&[resource, outcome.name()], &counts.buckets, counts.sum)
                })
            })?;
        }
        if let Some(dra) = &plugin.dra {
            write_dra(out, dra)?;
        }
        self.write_allocations(out)?;
        if let Some(adopted) = self.adopted {
            out.gauge(&f::ADOPTED, adopted)?;
        }
        out.gauge(&f::WARNINGS, self.survey.status.warnings.len() as u64)?;
        if let Some(findings) = &self.findings {
            out.family(&f::FINDINGS, |series| {
                findings.iter().try_for_each(|(kind, count)| series.counter(&[kind.name()], *count))
            })?;
        }
        if let Some((done, failed)) = self.commits {
            out.family(&f::COMMITS, |series| {
                series.counter(&["ok"], done)?;
                series.counter(&["failed"], failed)
            })?;
        }
        if let Some(events) = self.events {
            out.family(&f::EVENTS, |series| {
                events.iter().try_for_each(|(outcome, count)| series.counter(&[outcome], *count))
            })?;
        }
        if let Some(api) = &self.api {
            write_api(out, api)?;
        }
        if let Some(writing) = self.history_writing {
            out.gauge(&f::HISTORY_WRITING, u64::from(writing))?;
        }
        if let Some((taken, state)) = &self.reloads {
            out.family(&f::RELOADS, |series| {
                series.counter(&["ok"], *taken)?;
                series.counter(&["refused"], state.refused)
            })?;
            out.gauge(&f::RELOAD_OK, u64::from(state.errors.is_empty()))?;
            out.gauge(&f::RELOAD_TIME, unix_seconds(state.succeeded_unix_ms))?;
        }
        Ok(())
    }

    fn write_allocations(&self, out: &mut Writer<'_>) -> fmt::Result {
        let allocations = &self.survey.status.allocations;
        out.family(&f::ALLOCATIONS, |series| {
            let states = [
                ("allocated", AllocationState::Allocated),
                ("started", AllocationState::Started),
                ("parked", AllocationState::Parked),
            ];
            states.into_iter().try_for_each(|(name, state)| {
                let count = allocations.iter().filter(|one| one.state == state).count();
                series.gauge(&[name], count as u64)
            })
        })?;
        let unnamed = allocations
            .iter()
            .filter(|one| one.holder.is_none() && one.state != AllocationState::Parked);
        out.gauge(&f::UNNAMED, unnamed.count() as u64)
    }

    fn write_arbiter(&self, out: &mut Writer<'_>) -> fmt::Result {
        out.gauge(&f::ARBITER_UP, u64::from(self.survey.arbiter.is_some()))?;
        let Some(view) = &self.survey.arbiter else { return Ok(()) };
        out.family(&f::ARBITER_TURNS, |series| {
            let buckets: Vec<(f64, u64)> = view.turns.buckets().collect();
            series.histogram(&[], &buckets, view.turns.sum_ns as f64 / 1e9)
        })?;
        out.counter(&f::ARBITER_COMMANDS, view.commands)
    }

    fn write_process(&self, out: &mut Writer<'_>) -> fmt::Result {
        let process = self.process;
        if let Some(seconds) = process.cpu_seconds {
            out.counter(&f::PROCESS_CPU, seconds)?;
        }
        for (family, value) in [
            (&f::PROCESS_RESIDENT, process.resident_bytes),
            (&f::PROCESS_VIRTUAL, process.virtual_bytes),
            (&f::PROCESS_THREADS, process.threads),
            (&f::PROCESS_FDS, process.open_fds),
            (&f::PROCESS_MAX_FDS, process.max_fds),
        ] {
            value.map_or(Ok(()), |value| out.gauge(family, value))?;
        }
        out.gauge(&f::PROCESS_START, unix_seconds(self.started_unix_ms))
    }
}

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Writer(encoder);
        // Of one that is left out nothing but its health is known.
        let all = self.survey.status.gpus.clone();
        let (gpus, silent): (Vec<Gpu>, Vec<Gpu>) =
            all.into_iter().partition(|gpu| gpu.memory_total_bytes > 0);
        let known: Gpus<'_> = gpus
            .iter()
            .map(|gpu| {
                let known =
                    Known { index: gpu.index.to_string(), memory_bytes: gpu.memory_total_bytes };
                (gpu.uuid.as_str(), known)
            })
            .collect();
        self.write_containers(&mut out, &known)?;
        write_gpus(&mut out, (&gpus, &silent), &known, self)?;
        write_replicas(&mut out, &gpus, &known)?;
        write_leases(&mut out, &gpus, &known, self)?;
        self.write_plugin(&mut out)?;
        self.write_arbiter(&mut out)?;
        self.write_process(&mut out)
    }
}

fn unix_seconds(unix_ms: i64) -> f64 {
    unix_ms as f64 / 1000.0
}

fn write_api(out: &mut Writer<'_>, api: &tessera_web::Counts) -> fmt::Result {
    if let Some(listening) = api.listening() {
        out.gauge(&f::API_LISTENING, u64::from(listening))?;
        out.family(&f::API_REQUESTS, |series| {
            let mut requests = api.requests().into_iter();
            requests.try_for_each(|(code, count)| series.counter(&[&code.to_string()], count))
        })?;
    }
    let reviews = api.reviews();
    if reviews.is_empty() {
        return Ok(());
    }
    out.family(&f::API_REVIEWS, |series| {
        let mut reviews = reviews.iter();
        reviews.try_for_each(|(review, outcome, count)| series.counter(&[review, outcome], *count))
    })
}

fn write_dra(out: &mut Writer<'_>, dra: &Dra) -> fmt::Result {
    out.gauge(&f::DRA_REGISTERED, u64::from(dra.registered))?;
    out.gauge(&f::DRA_PUBLISHED, u64::from(dra.publication == "published"))?;
    out.gauge(&f::DRA_DEVICES, u64::from(dra.devices))?;
    out.family(&f::DRA_SLICE_WRITES, |series| series.counter(&[], dra.writes))?;
    out.family(&f::DRA_SLICE_WIPES, |series| series.counter(&[], dra.wipes))?;
    out.gauge(&f::DRA_CLAIMS, u64::from(dra.claims))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    use tessera_agent::fixtures::{self, GPU, MEMORY, Step};
    use tessera_gpu::{Discovery, DiscoveryError, GpuProcess, health};
    use tessera_model::gpu::Gpu;
    use tessera_view::node::Node;
    use tessera_view::status::{Health, Status};

    use super::*;

    /// A driver that nothing asks for GPUs.
    struct Driver;

    impl Discovery for Driver {
        fn gpus(&self, _: &tessera_config::Gpus) -> Result<Vec<Gpu>, DiscoveryError> {
            Ok(Vec::new())
        }

        fn memory_used(&self, _: &str) -> Result<u64, String> {
            Ok(0)
        }

        fn processes(&self, _: &str) -> Result<Vec<GpuProcess>, String> {
            Ok(Vec::new())
        }

        fn watch(
            &self,
            _: &[Gpu],
            _: std::time::Duration,
            _: &(dyn Fn() -> bool + Sync),
            _: &(dyn Fn(health::Observation) + Sync),
        ) -> Result<(), String> {
            Ok(())
        }
    }

    fn status_agrees(status: &Status) {
        let gpu = &status.gpus[0];
        let live = || status.allocations.iter().filter(|a| a.state != AllocationState::Parked);
        let sold = live().flat_map(|a| &a.gpus).map(|used| used.memory_limit_bytes).sum::<u64>();
        assert_eq!(gpu.memory_limits_bytes, sold);
        let cores = live().flat_map(|a| &a.gpus).map(|used| used.cores_millis).sum::<u32>();
        assert_eq!(gpu.cores_millis, cores);
        let free = gpu.replicas.iter();
        let free = free.filter(|one| one.allocation_id.is_empty() && one.health == Health::Healthy);
        let free: u64 = free.map(|replica| replica.memory_limit_bytes).sum();
        assert!(sold + free <= MEMORY, "{sold} sold and {free} free of {MEMORY}");
        // Each replica is held by the allocation that names it, and by no other.
        let holders = gpu.replicas.iter().filter(|replica| !replica.allocation_id.is_empty());
        let mut held: Vec<_> = holders.map(|one| (&one.allocation_id, &one.id)).collect();
        held.sort();
        let named = live().flat_map(|a| a.replica_ids.iter().map(move |id| (&a.id, id)));
        let mut named: Vec<_> = named.collect();
        named.sort();
        assert_eq!(held, named);
    }

    fn view_agrees(node: &Node) {
        let gpu = &node.gpus[0];
        let live = node.tenants.iter().filter(|tenant| tenant.state != "parked");
        let sold: u64 =
            live.flat_map(|tenant| &tenant.gpus).map(|used| used.memory_limit_bytes).sum();
        assert_eq!(gpu.memory_limits_bytes, sold);
        let fits: u64 = gpu.fits.iter().map(|fit| u64::from(fit.count) * fit.memory_bytes).sum();
        assert!(sold + fits <= MEMORY, "{sold} sold and {fits} fit of {MEMORY}");
        let replicas = &gpu.replicas[0];
        assert!(replicas.held + replicas.free <= replicas.count, "{replicas:?}");
    }

    fn metrics_agree(text: &str) {
        let sum = |family: &str| -> f64 {
            let of = |line: &&str| line.starts_with(&format!("{family}{{")) && line.contains(GPU);
            let lines = text.lines().filter(of);
            lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
        };
        let sold = sum("tessera_gpu_memory_sold_bytes");
        let each = sum("tessera_container_memory_limit_bytes");
        assert!(text.contains("tessera_gpu_memory_sold_bytes{"), "{text}");
        assert!(each <= sold && sold <= MEMORY as f64, "{each} of {sold} of {MEMORY}");
    }

    #[test]
    fn no_view_beside_a_storm_shows_more_sold_than_there_is_or_sums_that_contradict() {
        let (dir, runtime) =
            (tempfile::tempdir().unwrap(), tokio::runtime::Runtime::new().unwrap());
        let _in = runtime.enter();
        let agent = fixtures::open(dir.path(), Vec::new(), false);
        let config = fixtures::config(dir.path(), false);
        let view = StatusView::new(config.into(), Arc::new(Driver), Arc::default());
        view.set_agent(Arc::clone(&agent));
        let mut runner = TestRunner::deterministic();
        let steps = prop::collection::vec(any::<u64>().prop_map(Step::of), 200);
        let steps = (0..3).map(|_| steps.new_tree(&mut runner).unwrap().current()).collect();
        let mut totals = RunningTotals::new(Instant::now());
        let looks = fixtures::storm(&agent, runtime.handle(), steps, || {
            let status = view.status();
            status_agrees(&status);
            view_agrees(&crate::view::node("n", &status, Vec::new()));
            metrics_agree(&Snapshot::collect(&view, &mut totals).text().unwrap());
        });
        assert!(looks > 0);
    }
}
