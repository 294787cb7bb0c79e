//! Made-up fleets of any size, for tests of the server and the page. The same layout and instant always give the same
//! figures, and figures change from second to second: everything is a function of a name and the time.

mod past;

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::fleet::{Entry, Fleet};
use crate::gpu::{Fit, Gpu, Lease, Replicas};
use crate::node::{Node, Plugin, Warning};
use crate::tenant::{Compute, ComputePolicy, Tenant, Use};
use crate::{API_VERSION, workload};

/// How large a fleet is, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub nodes: usize,
    pub gpus: usize,
    /// Tenants of each GPU, at most; a GPU in five has fewer.
    pub tenants: usize,
    /// Sick and cordoned GPUs, nodes that do not answer, refusals.
    pub trouble: bool,
    /// Pods and namespaces with names that the API server would refuse: markup, controls, marks of direction, length.
    pub hostile: bool,
}

impl Default for Layout {
    fn default() -> Self {
        Layout { nodes: 3, gpus: 2, tenants: 4, trouble: true, hostile: false }
    }
}

/// A made-up fleet at an instant.
#[derive(Clone, Debug)]
pub struct MadeUp {
    layout: Layout,
    now_unix_ms: i64,
    away: BTreeSet<String>,
}

const HOUR_MS: i64 = 3_600_000;
/// The earliest instant of histories: 2026-11-16 00:00:00.
const SINCE_UNIX_MS: i64 = 1_794_787_200_000;
const SEED: u64 = 1;
const RESOURCE: &str = "tessera.dev/gpu";
/// Products and their memory.
const MODELS: [(&str, u64); 3] = [
    ("NVIDIA A100-SXM4-80GB", 80 << 30),
    ("NVIDIA H100 80GB HBM3", 80 << 30),
    ("NVIDIA A10", 23_028 << 20),
];
/// Never sold.
const RESERVE_BYTES: u64 = 1 << 30;
/// Charged for each context.
const CONTEXT_BYTES: u64 = 128 << 20;

impl MadeUp {
    /// A fleet as it is a day and a half after its beginning.
    pub fn new(layout: Layout) -> Self {
        MadeUp { layout, now_unix_ms: SINCE_UNIX_MS + 36 * HOUR_MS, away: BTreeSet::new() }
    }

    /// Time passes.
    pub fn tick(&mut self, ms: u32) {
        self.now_unix_ms = self.now_unix_ms.saturating_add(i64::from(ms));
    }

    /// A node stops answering, or answers again.
    pub fn set_away(&mut self, node: &str, away: bool) {
        if away {
            self.away.insert(node.to_owned());
        } else {
            self.away.remove(node);
        }
    }

    /// All nodes.
    pub fn fleet(&self) -> Fleet {
        Fleet {
            api_version: API_VERSION.to_owned(),
            name: "made-up".to_owned(),
            at_unix_ms: self.now_unix_ms,
            nodes: (0..self.layout.nodes).map(|node| self.entry(node)).collect(),
        }
    }

    fn entry(&self, index: usize) -> Entry {
        let name = node_name(index);
        let now = self.now_unix_ms;
        // The last of four and more is away where there is trouble, and one in fifty.
        let last = index == 3 || once_in(50, (SEED, "away", index));
        let was_away = self.layout.trouble && last;
        let is_away = was_away || self.away.contains(&name);
        let answered = if was_away { now / 600_000 * 600_000 - 754_000 } else { now - 3000 };
        let at = if is_away { answered } else { now };
        let error = "no answer within 5s: is the node up? `kubectl get node` says";
        Entry {
            node: name,
            answers: !is_away,
            answered_unix_ms: at,
            error: if is_away { error.to_owned() } else { String::new() },
            view: Some(self.node(index, at)),
        }
    }

    /// As it is at an instant.
    fn node(&self, index: usize, at: i64) -> Node {
        let places = (0..self.layout.gpus).map(|gpu| self.place(index, gpu));
        let shown: Vec<(Gpu, Vec<Tenant>)> = places.map(|place| place.shown(at)).collect();
        let (gpus, tenants): (Vec<_>, Vec<_>) = shown.into_iter().unzip();
        let warning = |gpu: &Gpu| Warning {
            text: trouble_of(gpu),
            since_unix_ms: gpu.state_since_unix_ms,
            ..Warning::default()
        };
        Node {
            api_version: API_VERSION.to_owned(),
            node: node_name(index),
            at_unix_ms: at,
            plugin: Plugin {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                started_unix_ms: SINCE_UNIX_MS,
                registration: "live".to_owned(),
                ready: true,
                resources: vec![RESOURCE.to_owned()],
                ..Plugin::default()
            },
            warnings: gpus.iter().filter(|gpu| gpu.state != "healthy").map(warning).collect(),
            gpus,
            tenants: tenants.into_iter().flatten().collect(),
            ..Node::default()
        }
    }

    fn place(&self, node: usize, gpu: usize) -> Place<'_> {
        Place { layout: &self.layout, node, gpu, now: self.now_unix_ms }
    }
}

fn trouble_of(gpu: &Gpu) -> String {
    format!("GPU {} is {}: {}", gpu.index, gpu.state, gpu.state_reason)
}

/// A GPU of the layout.
#[derive(Clone, Copy, Debug)]
struct Place<'a> {
    layout: &'a Layout,
    node: usize,
    gpu: usize,
    now: i64,
}

impl Place<'_> {
    fn key(&self, what: &'static str) -> (u64, &'static str, usize, usize) {
        (SEED, what, self.node, self.gpu)
    }

    fn uuid(&self) -> String {
        let b = bits(self.key("uuid"));
        format!("GPU-{:08x}-{:04x}-4000-8000-{:012x}", b >> 32, b & 0xffff, bits(b) >> 16)
    }

    /// GPUs of a node are of one model.
    fn model(&self) -> (&'static str, u64) {
        pick(&MODELS, (SEED, "model", self.node))
    }

    fn is_last_of(&self, node: usize) -> bool {
        self.node == node && self.gpu + 1 == self.layout.gpus
    }

    /// One in 20 GPUs is sick, or was; the last of the second node always.
    fn state(&self) -> (&'static str, &'static str, &'static str) {
        let sick = ("unhealthy", "XID 79", "a reset of the GPU, because of XID 79");
        match bits(self.key("state")) % 40 {
            _ if !self.layout.trouble => ("healthy", "", ""),
            _ if self.is_last_of(1) => sick,
            7 => sick,
            17 => ("suspect", "XID 48", "10m without a further error"),
            _ => ("healthy", "", ""),
        }
    }

    /// One in 30 is cordoned; the last of the first node always.
    fn cordon(&self) -> &'static str {
        let cordoned = self.is_last_of(0) || once_in(30, self.key("cordon"));
        let cordoned = self.layout.trouble && cordoned;
        if cordoned { "cordoned by kim@example.com: fan replaced on Tuesday" } else { "" }
    }

    /// Places for its tenants; one GPU in five has room.
    fn slots(&self) -> std::ops::Range<usize> {
        let most = self.layout.tenants;
        let has_room = once_in(5, self.key("fewer")) && most > 1;
        0..if has_room { most - 1 - most / 3 } else { most }
    }

    /// The share of each tenant, and its memory.
    fn share(&self) -> (u32, u64) {
        let share = 1000 / number(self.layout.tenants.max(1));
        let memory = (self.model().1 - RESERVE_BYTES) / 1000 * u64::from(share);
        (share, memory >> 20 << 20)
    }

    /// Namespace and pod.
    fn pod(&self, slot: usize) -> (String, String) {
        let key = (self.key("pod"), slot);
        if self.layout.hostile {
            let n = (self.node * self.layout.gpus + self.gpu) * self.layout.tenants.max(1) + slot;
            let long = "x".repeat(253);
            let text = |i: usize| HOSTILE.get(i % (HOSTILE.len() + 1)).map_or(&*long, |text| *text);
            let unique = if n > HOSTILE.len() { n.to_string() } else { String::new() };
            let namespace = if n.is_multiple_of(2) { text(n / 2) } else { "demo" };
            return (namespace.to_owned(), format!("{}{unique}", text(n)));
        }
        let (namespace, workload) = pick(&WORKLOADS, key);
        // Pods of one workload are of a few replica sets.
        let set = generated(9, bits((SEED, workload, bits(key) % 2)));
        (namespace.to_owned(), format!("{workload}-{set}-{}", generated(5, bits(key))))
    }

    /// All that is shown of a tenant at an instant.
    fn tenant(&self, slot: usize, at: i64) -> Tenant {
        let key = (self.key("tenant"), slot);
        let (namespace, pod) = self.pod(slot);
        let (share, limit) = self.share();
        let born_hours = i64::try_from(bits((key, "born")) % 20).unwrap_or(0);
        let born = SINCE_UNIX_MS + born_hours * HOUR_MS;
        let age_s = f64::from(i32::try_from((at - born) / 1000).unwrap_or(i32::MAX));
        let is_idle = once_in(12, (key, "idle")) && at > born + HOUR_MS;
        let is_greedy = self.layout.trouble && once_in(15, (key, "greedy"));
        let slow = wave((key, "slow"), 7_200_000, at);
        let fast = wave((key, "fast"), 40_000, at);
        // Parts of its share.
        let wants = (0.1 + 1.6 * part((key, "busy"))) * (0.4 + 1.2 * slow) * (0.7 + 0.6 * fast);
        let wants = if is_idle { 0.0 } else { wants };
        let got = wants.min(1.0) * f64::from(share) / 1000.0;
        let fills = 0.25 + 0.7 * part((key, "fills"));
        let charged = of_bytes(limit, fills * (0.7 + 0.2 * slow + 0.1 * fast));
        let overhead = if once_in(9, (key, "overhead")) { 64 << 20 } else { 0 };
        let is_strict = once_in(6, (key, "policy"));
        let used = Use {
            gpu_uuid: self.uuid(),
            memory_limit_bytes: limit,
            memory_charged_bytes: charged,
            memory_granted_bytes: charged,
            memory_used_bytes: charged + overhead,
            memory_peak_bytes: of_bytes(limit, if is_greedy { 1.0 } else { fills }),
            memory_overhead_bytes: overhead,
            context_overhead_bytes: CONTEXT_BYTES.min(limit),
            memory_nvml_bytes: Some(charged),
            cores_millis: share,
            policy: if is_strict { ComputePolicy::Strict } else { ComputePolicy::Burst },
            changed: once_in(11, (key, "changed")),
            ..Use::default()
        };
        let got_us = count(age_s * 1e6 * got * 0.8);
        let waits = wants > 1.0;
        let waited_us = if waits { got_us / 4 } else { 0 };
        let id = bits(key);
        Tenant {
            id: format!("{id:016x}{:016x}", bits(id)),
            generation: 1,
            state: "started".to_owned(),
            workload: workload::of(&pod).to_owned(),
            namespace,
            pod,
            container: "main".to_owned(),
            resource_name: RESOURCE.to_owned(),
            allocated_unix_ms: born,
            started_unix_ms: born + 1500,
            gpus: vec![used],
            compute: Some(Compute {
                gate: if waits { "closed" } else { "open" }.to_owned(),
                got_1s_millis: millis(got),
                got_10s_millis: millis(got),
                used_10s_millis: Some(millis(got)),
                leased_us: got_us,
                used_us: got_us,
                measured_us: got_us,
                waited_us,
                waiting_us: waits.then_some(2000),
                leases: got_us / 5000,
                ..Compute::default()
            }),
            processes: 1,
            refusals: if is_greedy { count(age_s / 40.0) } else { 0 },
            launches: got_us / 120,
            gpu_time_us: got_us,
            gate_wait_us: waited_us,
            ..Tenant::default()
        }
    }

    /// A GPU and its tenants at an instant.
    fn shown(&self, at: i64) -> (Gpu, Vec<Tenant>) {
        let tenants: Vec<Tenant> = self.slots().map(|slot| self.tenant(slot, at)).collect();
        let sum = |bytes: fn(&Use) -> u64| -> u64 {
            tenants.iter().flat_map(|tenant| &tenant.gpus).map(bytes).sum()
        };
        let computes = || tenants.iter().filter_map(|one| Some((one, one.compute.as_ref()?)));
        let (state, reason, waits_for) = self.state();
        let (model, total) = self.model();
        let charged = sum(|used| used.memory_charged_bytes);
        let limits = sum(|used| used.memory_limit_bytes);
        let strangers = self.layout.trouble && once_in(25, self.key("outside"));
        let outside = if strangers { (total - limits - RESERVE_BYTES).min(900 << 20) } else { 0 };
        let (share, memory) = self.share();
        let (count, held) = (number(self.layout.tenants), number(tenants.len()));
        let sells = state == "healthy" && self.cordon().is_empty();
        let free = if sells { count - held } else { 0 };
        let fit = Fit {
            resource_name: RESOURCE.to_owned(),
            count: free,
            memory_bytes: memory,
            cores_millis: share,
        };
        // A tenant holds the lease at an instant as often as it gets time.
        let turn = number(usize::try_from(bits((self.key("turn"), at / 1000)) % 1000).unwrap_or(0));
        let mut below = 0;
        let holder = computes().find(|(_, compute)| {
            below += compute.got_10s_millis;
            turn < below
        });
        let waiting = computes().filter(|(_, compute)| compute.waiting_us.is_some()).count();
        let gpu = Gpu {
            uuid: self.uuid(),
            index: number(self.gpu),
            name: model.to_owned(),
            pci_bus_id: format!("00000000:{:02X}:00.0", 0x17 + self.gpu),
            numa_node: Some(if self.gpu * 2 < self.layout.gpus { 0 } else { 1 }),
            state: state.to_owned(),
            state_reason: reason.to_owned(),
            state_since_unix_ms: if state == "healthy" { 0 } else { self.sick_since() },
            state_waits_for: waits_for.to_owned(),
            cordon: self.cordon().to_owned(),
            front_end: "device plugin".to_owned(),
            memory_total_bytes: total,
            memory_used_bytes: (sum(|used| used.memory_used_bytes) + outside).min(total),
            memory_reserve_bytes: RESERVE_BYTES,
            memory_limits_bytes: limits,
            memory_charged_bytes: charged,
            memory_outside_bytes: outside,
            context_overhead_bytes: CONTEXT_BYTES,
            cores_millis: share * held,
            lease: Some(Lease {
                holder: holder.map(|(tenant, _)| tenant.id.clone()).unwrap_or_default(),
                waiting: number(waiting),
                quantum_us: 20_000,
            }),
            replicas: vec![Replicas {
                resource_name: RESOURCE.to_owned(),
                count,
                held,
                free,
                memory_limit_bytes: memory,
                cores_millis: share,
            }],
            fits: if free > 0 { vec![fit] } else { Vec::new() },
            ..Gpu::default()
        };
        (gpu, tenants)
    }

    /// Some hours ago, and always at the same instant of a day.
    fn sick_since(&self) -> i64 {
        let day = self.now / 86_400_000 * 86_400_000;
        let minutes = i64::try_from(bits(self.key("since")) % 600).unwrap_or(0);
        (day - minutes * 60_000).max(SINCE_UNIX_MS)
    }
}

const WORKLOADS: [(&str, &str); 8] = [
    ("assistants", "chat"),
    ("assistants", "chat-large"),
    ("search", "embed"),
    ("vision", "detect"),
    ("speech", "transcribe"),
    ("ranking", "feed"),
    ("research", "sweep"),
    ("notebooks", "jupyter-kim"),
];

/// Names that nobody may have, and that somebody may send.
const HOSTILE: [&str; 8] = [
    "<script>window.pwned=1</script>",
    "<img src=x onerror=\"window.pwned=2\">",
    "\"><svg onload=window.pwned=3>",
    "\u{202e}gnp.exe\u{202c}\u{200b}",
    "line\nbreak\r\t\u{1b}[31mred\u{7}\u{0}",
    "#/gpu/../../%2e%2e?x=1&y=<b>",
    "__proto__",
    "${window.pwned=4}{{constructor.constructor('window.pwned=5')()}}",
];

fn node_name(index: usize) -> String {
    format!("gpu-{:03}", index + 1)
}

/// Letters as Kubernetes draws them for a pod's name.
fn generated(length: usize, mut of: u64) -> String {
    let mut text = String::new();
    for _ in 0..length {
        text.push(char::from(pick(b"bcdfghjklmnpqrstvwxz2456789", of)));
        of = bits(of);
    }
    text
}

/// Chance that repeats: 64 bits from anything that hashes.
fn bits(of: impl Hash) -> u64 {
    // `DefaultHasher::new` has fixed keys.
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// From 0 to 1, without 1.
fn part(of: impl Hash) -> f64 {
    // 32 bits are exact in a double.
    let high = u32::try_from(bits(of) >> 32).unwrap_or(0);
    f64::from(high) / 4_294_967_296.0
}

fn once_in(n: u64, of: impl Hash) -> bool {
    bits(of).is_multiple_of(n)
}

fn pick<T: Copy>(from: &[T], of: impl Hash) -> T {
    let i = bits(of) % (from.len() as u64);
    from[usize::try_from(i).unwrap_or(0)]
}

/// A smooth line between 0 and 1 through a random value every `period_ms`, which is hours at most.
fn wave(of: impl Hash + Copy, period_ms: i32, at_unix_ms: i64) -> f64 {
    let step = at_unix_ms.div_euclid(period_ms.into());
    let within = i32::try_from(at_unix_ms.rem_euclid(period_ms.into())).unwrap_or(0);
    let within = f64::from(within) / f64::from(period_ms);
    let (from, to) = (part((of, step)), part((of, step + 1)));
    from + (to - from) * within * within * (3.0 - 2.0 * within)
}

/// A count, from a figure that is not negative. Sizes are below 2^53.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn count(figure: f64) -> u64 {
    figure.clamp(0.0, 1e15) as u64
}

fn of_bytes(bytes: u64, part: f64) -> u64 {
    count(bytes as f64 * part)
}

fn millis(part: f64) -> u32 {
    u32::try_from(count((part * 1000.0).round())).unwrap_or(0)
}

fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
