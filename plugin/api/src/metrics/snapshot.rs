//! One snapshot of everything, and the series that [`families`](super::families) reads from it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::{Display, Write};
use std::sync::Arc;
use std::time::Instant;

use nix::sys::resource::{Resource, getrlimit};
use nix::time::{ClockId, clock_gettime};
use tessera_agent::Agent;
use tessera_agent::front_end::{Call, Counts, Outcome};
use tessera_agent::trust::Outside;
use tessera_arbiter::View;
use tessera_tenant::regions::Region;
use tessera_view::status::{self, Allocation, Configuration, Dra, Gpu, Holder, Status};
use tessera_view::tenant::{Compute, Use};

use super::families::{ALL, Family, MetricKind};
use super::running_totals::{RunningTotals, Totals};
use crate::admin::{StatusView, Survey};

/// One series.
#[derive(Debug)]
pub(super) struct Sample<'s> {
    /// In the order of its family's labels.
    labels: Vec<Cow<'s, str>>,
    value: Value,
}

/// What a series shows.
#[derive(Debug)]
pub(super) enum Value {
    /// Nobody knows the value now; the series is left out.
    Absent,
    Whole(u64),
    Part(f64),
    /// Counts by the bounds of their buckets, and the sum.
    Histogram(Vec<(f64, u64)>, f64),
}

/// Labels beyond those of the subject, and the value.
pub(super) type Labelled<'s> = (Vec<Cow<'s, str>>, Value);

macro_rules! values {
    ($($kind:ident of $($number:ty),*;)*) => {
        $($(impl From<$number> for Value {
            fn from(number: $number) -> Self {
                Value::$kind(number as _)
            }
        })*)*
    };
}

values! {
    Whole of u64, u32, usize, bool;
    Part of f64;
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Value::Absent, T::into)
    }
}

impl<'s> Sample<'s> {
    pub fn of(labels: Vec<Cow<'s, str>>, value: impl Into<Value>) -> Self {
        Sample { labels, value: value.into() }
    }
}

/// The series of a family without labels.
pub(super) fn one<'s>(value: impl Into<Value>) -> Vec<Sample<'s>> {
    vec![Sample::of(Vec::new(), value)]
}

/// The series of a family with one label.
pub(super) fn by<'s, V: Into<Value>>(
    all: impl IntoIterator<Item = (&'s str, V)>,
) -> Vec<Sample<'s>> {
    all.into_iter().map(|(label, value)| Sample::of(vec![label.into()], value)).collect()
}

/// Everything there is to tell at one moment.
pub(super) struct Snapshot {
    pub view: Arc<StatusView>,
    survey: Survey,
    /// Of each allocation, in the survey's order.
    totals: Vec<Totals>,
    /// Index and memory of each GPU that answers, by its UUID.
    known: HashMap<String, (String, u64)>,
    pub process: Process,
}

/// What is shown of a container.
#[derive(Clone, Copy, Debug)]
pub(super) struct Container<'s> {
    pub allocation: &'s Allocation,
    holder: &'s Holder,
    pub totals: &'s Totals,
    /// Its usage page could be read.
    pub is_read: bool,
}

impl<'s> Container<'s> {
    pub fn compute(&self) -> Option<&'s Compute> {
        self.allocation.compute.as_ref()
    }
}

impl Snapshot {
    /// Looks at everything, but changes nothing and waits for no tenant. Blocking: asks the driver.
    pub fn collect(view: &Arc<StatusView>, running_totals: &mut RunningTotals) -> Self {
        let survey = view.survey(&Region::try_snapshot);
        let now = Instant::now();
        let adopted = view.agent.get().map_or(0, |agent| agent.allocations.adopted_until);
        let allocations = &survey.status.allocations;
        let totals = allocations
            .iter()
            .map(|allocation| {
                let readable = !survey.unread.contains(&allocation.id);
                running_totals.update(allocation, readable, allocation.generation <= adopted, now)
            })
            .collect();
        running_totals.retain(allocations);
        let answering = survey.status.gpus.iter().filter(|gpu| answers(gpu));
        let known = |gpu: &Gpu| (gpu.uuid.clone(), (gpu.index.to_string(), gpu.memory_total_bytes));
        let (known, process) = (answering.map(known).collect(), Process::read());
        Snapshot { view: Arc::clone(view), survey, totals, known, process }
    }

    /// The text of every family that has series.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for family in ALL {
            let mut samples = (family.read)(self);
            samples.retain(|sample| !matches!(sample.value, Value::Absent));
            if !samples.is_empty() {
                write(&mut out, family, &samples);
            }
        }
        out
    }

    pub fn status(&self) -> &Status {
        &self.survey.status
    }

    pub fn agent(&self) -> Option<&Arc<Agent>> {
        self.view.agent.get()
    }

    /// How the arbiter stands; `None` if it does not answer.
    pub fn arbiter(&self) -> Option<&View> {
        self.survey.arbiter.as_ref()
    }

    /// How often the configuration was read and found good, and how it stands with it.
    pub fn reloads(&self) -> Option<(u64, Configuration)> {
        self.agent().and(self.view.reloader.get()).map(|one| (one.taken(), one.state()))
    }

    pub fn dra<V>(&self, read: impl Fn(&Dra) -> V) -> Option<V> {
        self.status().plugin.dra.as_ref().map(read)
    }

    /// Use of a GPU beside containers with shares. Without a look the series is left out: 0 would be a guess.
    pub fn outside(&self, gpu: &Gpu) -> Option<Outside> {
        self.agent()?.trust.outside(&gpu.uuid)
    }

    pub fn resources<V: Into<Value>>(
        &self,
        read: impl Fn(&status::Resource) -> V,
    ) -> Vec<Sample<'_>> {
        by(self.status().plugin.resources.iter().map(|one| (one.name.as_str(), read(one))))
    }

    pub fn calls(&self, call: Call) -> Vec<Sample<'_>> {
        let calls = self.agent().into_iter().flat_map(|agent| agent.meters.calls(call));
        let sample = |(resource, outcome, counts): (Arc<str>, Outcome, Counts)| {
            let labels = vec![resource.to_string().into(), outcome.into_str().into()];
            Sample::of(labels, Value::Histogram(counts.buckets, counts.sum))
        };
        calls.map(sample).collect()
    }

    /// Allocations of containers, by the names that kubelet gave. A container may have several, also of one GPU; and
    /// where a pod has been replaced by one of the same name, the older allocation may still be there for a while.
    fn named(&self) -> impl Iterator<Item = Container<'_>> {
        let all = self.status().allocations.iter().zip(&self.totals);
        all.filter_map(|(allocation, totals)| {
            let holder = allocation.holder.as_ref()?;
            let is_read = !self.survey.unread.contains(&allocation.id);
            Some(Container { allocation, holder, totals, is_read })
        })
    }

    /// `uuid`: of the GPU; empty where an allocation has several.
    fn labels<'s>(&'s self, one: &Container<'s>, uuid: &'s str) -> Vec<Cow<'s, str>> {
        let index = self.known.get(uuid).map_or("", |(index, _)| index);
        let Holder { namespace, pod, container } = one.holder;
        [namespace, pod, container, index, uuid, &one.allocation.id].map(Cow::Borrowed).into()
    }

    /// Of each container.
    pub fn containers<'s, V: Into<Value>>(
        &'s self,
        read: impl Fn(&Container<'s>) -> V,
    ) -> Vec<Sample<'s>> {
        self.containers_with(|one| (Vec::new(), read(one).into()))
    }

    /// Of each container, with labels of the family's own.
    pub fn containers_with<'s>(
        &'s self,
        read: impl Fn(&Container<'s>) -> Labelled<'s>,
    ) -> Vec<Sample<'s>> {
        let sample = |one: Container<'s>| {
            let uuid = match one.allocation.gpus.as_slice() {
                [only] => only.gpu_uuid.as_str(),
                _ => "",
            };
            let (more, value) = read(&one);
            Sample::of([self.labels(&one, uuid), more].concat(), value)
        };
        self.named().map(sample).collect()
    }

    /// Of each GPU of each container.
    pub fn uses<'s, V: Into<Value>>(
        &'s self,
        read: impl Fn(&Container<'s>, &'s Use) -> V,
    ) -> Vec<Sample<'s>> {
        let mut all = Vec::new();
        for one in self.named() {
            for used in &one.allocation.gpus {
                all.push(Sample::of(self.labels(&one, &used.gpu_uuid), read(&one, used)));
            }
        }
        all
    }

    /// As [`Snapshot::uses`]. A page is its tenant's word: nobody holds more than there is.
    pub fn bytes<'s>(
        &'s self,
        read: impl Fn(&Container<'s>, &'s Use) -> Option<u64>,
    ) -> Vec<Sample<'s>> {
        self.uses(|one, used| {
            let most = self.known.get(&used.gpu_uuid).map_or(u64::MAX, |(_, bytes)| *bytes);
            read(one, used).map(|bytes| bytes.min(most))
        })
    }

    /// Of each GPU that answers.
    pub fn gpus<'s, V: Into<Value>>(&'s self, read: impl Fn(&'s Gpu) -> V) -> Vec<Sample<'s>> {
        self.gpus_with(|gpu| vec![(Vec::new(), read(gpu).into())])
    }

    /// Of each GPU that answers, with labels of the family's own.
    pub fn gpus_with<'s>(&'s self, read: impl Fn(&'s Gpu) -> Vec<Labelled<'s>>) -> Vec<Sample<'s>> {
        self.all_gpus(|gpu| if answers(gpu) { read(gpu) } else { Vec::new() })
    }

    /// As [`Snapshot::gpus_with`], also of those that are left out: nothing but their health is known.
    pub fn all_gpus<'s>(&'s self, read: impl Fn(&'s Gpu) -> Vec<Labelled<'s>>) -> Vec<Sample<'s>> {
        let samples = |gpu: &'s Gpu| {
            let own = [gpu.index.to_string().into(), gpu.uuid.as_str().into()];
            let sample = move |(more, value): Labelled<'s>| {
                Sample::of(own.iter().cloned().chain(more).collect(), value)
            };
            read(gpu).into_iter().map(sample)
        };
        self.status().gpus.iter().flat_map(samples).collect()
    }

    /// Of GPUs that some container has; of the others the arbiter knows nothing.
    pub fn leases<'s, V: Into<Value>>(&'s self, read: impl Fn(&'s Gpu) -> V) -> Vec<Sample<'s>> {
        let shared = self.arbiter().map(|view| view.gpus.as_slice()).unwrap_or_default();
        self.gpus(|gpu| shared.iter().any(|share| share.uuid == gpu.uuid).then(|| read(gpu)))
    }
}

fn answers(gpu: &Gpu) -> bool {
    gpu.memory_total_bytes > 0
}

/// A GPU's replicas of each resource, by state.
pub(super) fn replicas(gpu: &Gpu) -> Vec<Labelled<'_>> {
    let each = gpu.by_resource().into_iter().flat_map(|of| {
        let states =
            [("free", of.free), ("held", of.held), ("unhealthy", of.count - of.held - of.free)];
        states.map(|(state, count)| {
            (vec![of.resource_name.clone().into(), state.into()], count.into())
        })
    });
    each.collect()
}

fn write(out: &mut String, family: &Family, samples: &[Sample<'_>]) {
    let name = family.name();
    // Prometheus' format has no infos.
    let kind = match family.kind {
        MetricKind::Info => "gauge",
        kind => kind.into_str(),
    };
    // Writing to a string does not fail.
    let _ = writeln!(out, "# HELP {name} {}\n# TYPE {name} {kind}", family.help);
    for Sample { labels, value } in samples {
        debug_assert_eq!(family.labels.len(), labels.len(), "{name}");
        let labels: Vec<String> = family
            .labels
            .iter()
            .zip(labels)
            .map(|(name, value)| format!("{name}=\"{}\"", escaped(value)))
            .collect();
        let labels = labels.join(",");
        match value {
            Value::Absent => {}
            Value::Whole(number) => line(out, &name, &labels, number),
            Value::Part(number) => line(out, &name, &labels, number),
            Value::Histogram(buckets, sum) => {
                line(out, &format!("{name}_sum"), &labels, sum);
                let count: u64 = buckets.iter().map(|(_, count)| count).sum();
                line(out, &format!("{name}_count"), &labels, count);
                let mut below = 0;
                for (bound, count) in buckets {
                    below += count;
                    let bound = if bound.is_finite() { bound.to_string() } else { "+Inf".into() };
                    let comma = if labels.is_empty() { "" } else { "," };
                    let labels = format!("{labels}{comma}le=\"{bound}\"");
                    line(out, &format!("{name}_bucket"), &labels, below);
                }
            }
        }
    }
}

fn line(out: &mut String, name: &str, labels: &str, value: impl Display) {
    let _ = match labels {
        "" => writeln!(out, "{name} {value}"),
        labels => writeln!(out, "{name}{{{labels}}} {value}"),
    };
}

/// A label's value may be a stranger's word.
fn escaped(value: &str) -> Cow<'_, str> {
    match value.contains(['\\', '"', '\n']) {
        false => value.into(),
        true => value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n").into(),
    }
}

/// What the kernel says of this process, by the names of Prometheus' own clients; `None` where it does not.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Process {
    pub cpu_seconds: Option<f64>,
    pub resident_bytes: Option<u64>,
    pub virtual_bytes: Option<u64>,
    pub threads: Option<u64>,
    pub open_fds: Option<u64>,
    pub max_fds: Option<u64>,
}

impl Process {
    /// As it is now.
    pub fn read() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
        };
        let kib = |name: &str| field(name).map(|kib| kib.saturating_mul(1024));
        let cpu = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).ok();
        // One of them reads the directory.
        let entries = std::fs::read_dir("/proc/self/fd").ok();
        let open = entries.and_then(|entries| u64::try_from(entries.count()).ok());
        Process {
            cpu_seconds: cpu.map(|cpu| std::time::Duration::from(cpu).as_secs_f64()),
            resident_bytes: kib("VmRSS"),
            virtual_bytes: kib("VmSize"),
            threads: field("Threads"),
            open_fds: open.map(|open| open.saturating_sub(1)),
            max_fds: getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| soft),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    use tessera_agent::fixtures::{self, GPU, MEMORY, Step};
    use tessera_gpu::nvml::NvmlDiscovery;
    use tessera_view::node::Node;
    use tessera_view::status::{AllocationState, Health, Status};

    use super::*;

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
        // No driver: nothing of it is looked at.
        let discovery = NvmlDiscovery::new(Some(dir.path().join("no-driver")));
        let view = StatusView::new(config.into(), Arc::new(discovery), Arc::default());
        let view = Arc::new(view);
        let _ = view.agent.set(Arc::clone(&agent));
        let mut runner = TestRunner::deterministic();
        let steps = prop::collection::vec(any::<u64>().prop_map(Step::of), 200);
        let steps = (0..3).map(|_| steps.new_tree(&mut runner).unwrap().current()).collect();
        let mut totals = RunningTotals::new(Instant::now());
        let looks = fixtures::storm(&agent, runtime.handle(), steps, || {
            let status = view.status();
            status_agrees(&status);
            view_agrees(&crate::view::node("n", &status, Vec::new()));
            metrics_agree(&Snapshot::collect(&view, &mut totals).text());
        });
        assert!(looks > 0);
    }

    #[test]
    fn a_text_names_what_it_shows_and_no_label_ends_its_line() {
        let family = |name: &str| ALL.iter().find(|family| family.name() == name).unwrap();
        let text = |name: &str, samples: &[Sample<'_>]| {
            let mut out = String::new();
            write(&mut out, family(name), samples);
            let rest = out.split_once('\n').unwrap().1;
            rest.to_owned()
        };
        let commits = by([("a\"\\\nb", 7u64)]);
        let want = "# TYPE tessera_ledger_commits_total counter\n\
                    tessera_ledger_commits_total{outcome=\"a\\\"\\\\\\nb\"} 7\n";
        assert_eq!(text("tessera_ledger_commits_total", &commits), want);
        let build = vec![Sample::of(vec!["1".into(), "2".into()], 1u64)];
        let want = "# TYPE tessera_build_info gauge\n\
                    tessera_build_info{version=\"1\",page_abi=\"2\"} 1\n";
        assert_eq!(text("tessera_build_info", &build), want);
        let turns = one(Value::Histogram(vec![(0.5, 2), (f64::INFINITY, 1)], 3.25));
        let turns = text("tessera_arbiter_turn_duration_seconds", &turns);
        let of =
            |line: &str| turns.contains(&format!("tessera_arbiter_turn_duration_seconds_{line}\n"));
        assert!(of("sum 3.25") && of("count 3") && of("bucket{le=\"0.5\"} 2"), "{turns}");
        assert!(of("bucket{le=\"+Inf\"} 3"), "{turns}");
    }

    #[test]
    fn the_kernel_tells_all_of_it() {
        let process = Process::read();
        assert!(process.cpu_seconds.unwrap() > 0.0);
        assert!(process.resident_bytes.unwrap() > 1 << 20);
        assert!(process.virtual_bytes.unwrap() >= process.resident_bytes.unwrap());
        assert!(process.threads.unwrap() >= 1);
        assert!((3..process.max_fds.unwrap()).contains(&process.open_fds.unwrap()));
    }
}
