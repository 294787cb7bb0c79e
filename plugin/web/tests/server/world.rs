//! A node with tenants of four namespaces and of nobody, in which every string about a tenant has its namespace's
//! name in it; and an API server with a user for each set of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tessera_cluster::Client as ClusterClient;
use tessera_cluster::fixtures::ApiServer;
use tessera_view::advice::{
    Change, NamespaceWaste, Recommendation, Recommendations, TenantWaste, Waste, What,
};
use tessera_view::explain::{
    Behind, Enforcement, Explanation, Explanations, GpuStory, Incident, Limit, Neighbour,
    Placement, Story, TrailLine,
};
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::gpu::{Gpu, Lease};
use tessera_view::history::{self, Event, GpuSeries, TenantSeries};
use tessera_view::node::{Node, Plugin, Warning};
use tessera_view::status::{Allocation, Claim, Gpu as RootGpu, Holder};
use tessera_view::tenant::{Compute, Tenant, Use};
use tessera_view::trace::{self, Args, Trace};
use tessera_web::authorise::Times;
use tessera_web::client::{Client, Endpoint};
use tessera_web::{Authorisation, Counts, Server, Tls};

use crate::common::{Script, Scripted, serve_to};

/// Namespaces with tenants.
pub const NAMESPACES: [&str; 4] = ["ns-alpha", "ns-beta", "ns-gamma", "ns-delta"];
/// In all that is of a tenant that nobody named.
pub const NOBODY: &str = "named-by-nobody";
pub const OPERATORS: &str = "for-operators-only";
/// What a pod may be called where nobody checks.
const HOSTILE: [&str; 5] =
    ["<script>alert(1)</script>", "../../", "\u{202e}\u{0}\r\n", "\"}],\"x\":[{\"", "' OR ''='"];

fn tenant(mark: &str, namespace: &str, number: usize) -> Tenant {
    let odd = HOSTILE[number % HOSTILE.len()];
    let named = |what: &str| format!("{mark} {what} {odd}");
    let used = |gpu: usize| Use {
        gpu_uuid: format!("GPU-{gpu}"),
        memory_limit_bytes: 1000 + number as u64,
        memory_charged_bytes: 10 + number as u64,
        cores_millis: 7,
        ..Use::default()
    };
    Tenant {
        id: format!("id-{number}-{mark}"),
        namespace: namespace.to_owned(),
        pod: if namespace.is_empty() { String::new() } else { named("pod") },
        container: named("container"),
        other_holders: vec![named("holder")],
        workload: named("workload"),
        claim: named("claim"),
        request: named("request"),
        gpus: (0..=number % 2).map(used).collect(),
        compute: Some(Compute { got_10s_millis: 3, ..Compute::default() }),
        ..Tenant::default()
    }
}

/// Every mark that there is.
fn all_marks() -> Vec<&'static str> {
    NAMESPACES.into_iter().chain([NOBODY, OPERATORS]).collect()
}

pub fn everybody() -> String {
    all_marks().join(" ")
}

fn gpu(number: usize) -> Gpu {
    let holder = match number {
        0 => format!("id-1-{}", NAMESPACES[1]),
        _ => format!("id-9-{NOBODY}"),
    };
    Gpu {
        uuid: format!("GPU-{number}"),
        index: u32::try_from(number).unwrap(),
        state: "healthy".to_owned(),
        cordon: format!("cordoned by uid 0: {}", everybody()),
        withheld: format!("sold by {}", everybody()),
        lease: Some(Lease { holder, ..Lease::default() }),
        ..Gpu::default()
    }
}

fn series(tenant: &Tenant) -> TenantSeries {
    TenantSeries {
        id: tenant.id.clone(),
        namespace: tenant.namespace.clone(),
        pod: tenant.pod.clone(),
        container: tenant.container.clone(),
        workload: tenant.workload.clone(),
        ..TenantSeries::default()
    }
}

fn event(mark: &str, pod: String) -> Event {
    Event {
        happened: format!("{mark} happened"),
        reason: everybody(),
        by: everybody(),
        behind: Some(behind(NAMESPACES[1])),
        what: format!("{mark} what"),
        tenant: format!("{mark} id"),
        pod,
        text: format!("{mark} text"),
        ..Event::default()
    }
}

/// Subjects of explanations, and whose they are: a pod of each namespace, the same by their common name, one that nobody
/// named, a GPU.
pub fn subjects() -> Vec<(String, Vec<&'static str>)> {
    let mut all: Vec<(String, Vec<&'static str>)> =
        NAMESPACES.iter().map(|name| (format!("{name}/pod"), vec![*name])).collect();
    all.push(("pod".to_owned(), NAMESPACES.to_vec()));
    all.push(("unnamed".to_owned(), vec![""]));
    all.push(("GPU-0".to_owned(), Vec::new()));
    all
}

/// A track for each namespace and for nobody.
fn trace() -> Trace {
    let mut trace = Trace::begun(1);
    for (mark, tid) in NAMESPACES.into_iter().chain([NOBODY]).zip(1..) {
        let namespace = if mark == NOBODY { "" } else { mark };
        let args = Args {
            name: format!("{mark} pod"),
            namespace: namespace.into(),
            allocation: format!("{mark} id"),
            ..Args::default()
        };
        trace.events.push(trace::name("thread_name", 1, tid, args));
        let args = Some(Box::new(Args { share: format!("{mark} share"), ..Args::default() }));
        let lease = trace::Event {
            ph: "X".into(),
            name: "lease".into(),
            pid: 1,
            tid,
            args,
            ..Default::default()
        };
        trace.events.push(lease);
    }
    trace
}

pub fn script() -> Script {
    let mut tenants: Vec<Tenant> = Vec::new();
    for number in 0..10 {
        tenants.push(match NAMESPACES.get(number % 5) {
            Some(name) => tenant(name, name, number),
            None => tenant(NOBODY, "", number),
        });
    }
    let view = Node {
        node: "n1".into(),
        plugin: Plugin { amiss: vec![everybody()], config_error: everybody(), ..Plugin::default() },
        gpus: vec![gpu(0), gpu(1)],
        tenants: tenants.clone(),
        warnings: vec![Warning { text: everybody(), ..Warning::default() }],
        ..Node::default()
    };
    let silent = Entry { node: "n2".into(), error: everybody(), ..Entry::default() };
    let entry = Entry { node: "n1".into(), answers: true, view: Some(view), ..Entry::default() };
    // Some have been there, and are gone.
    let gone = series(&tenant(NAMESPACES[3], NAMESPACES[3], 77));
    let mut events: Vec<Event> =
        NAMESPACES.iter().map(|name| event(name, format!("{name}/{name} pod"))).collect();
    events.push(event(OPERATORS, String::new()));
    events.push(event(NOBODY, "/".into()));
    let advice = |mark: &str, namespace: &str| Recommendation {
        namespace: namespace.into(),
        workload: format!("{mark} workload"),
        container: format!("{mark} container"),
        pods: vec![format!("{mark} pod")],
        evidence: vec![format!("{mark} evidence")],
        changes: vec![Change::written(
            What::Quota {
                of: format!("{mark} pod"),
                container: format!("{mark} container"),
                memory_bytes: None,
                cores_millis: None,
            },
            "tessera",
        )],
        ..Recommendation::default()
    };
    let waste = |mark: &str, namespace: &str| NamespaceWaste {
        namespace: namespace.into(),
        tenants: vec![TenantWaste { pod: format!("{mark} pod"), ..TenantWaste::default() }],
        ..NamespaceWaste::default()
    };
    let explanations = subjects().into_iter().map(|(subject, namespaces)| {
        let stories = namespaces.iter().map(|namespace| story(namespace)).collect();
        let about_gpu = namespaces.is_empty();
        (subject, Explanations::of(vec![("n1".to_owned(), explanation(stories, about_gpu))]))
    });
    Script {
        trace: trace(),
        queries: Vec::new(),
        fleet: Fleet { nodes: vec![entry, silent], ..Fleet::default() },
        history: history::Answer {
            gpus: vec![GpuSeries { gpu_uuid: "GPU-0".into(), ..GpuSeries::default() }],
            tenants: tenants.iter().map(series).chain([gone]).collect(),
            events,
            remarks: vec![everybody()],
            ..history::Answer::default()
        },
        recommendations: Recommendations {
            workloads: NAMESPACES
                .iter()
                .map(|name| advice(name, name))
                .chain([advice(NOBODY, "")])
                .collect(),
            remarks: vec![everybody()],
            ..Recommendations::default()
        },
        waste: Waste {
            namespaces: NAMESPACES
                .iter()
                .map(|name| waste(name, name))
                .chain([waste(NOBODY, "")])
                .collect(),
            remarks: vec![everybody()],
            ..Waste::default()
        },
        explanations: explanations.collect(),
        error: None,
    }
}

/// The namespaces of the bits of a number.
pub fn set(bits: usize) -> BTreeSet<&'static str> {
    let named = NAMESPACES.iter().enumerate().filter(|(bit, _)| bits >> bit & 1 == 1);
    named.map(|(_, name)| *name).collect()
}

/// The marks that a reader of these must never see.
pub fn hidden(seen: &BTreeSet<&str>) -> Vec<&'static str> {
    all_marks().into_iter().filter(|mark| !seen.contains(mark)).collect()
}

pub struct World {
    pub source: Scripted,
    pub cluster: ApiServer,
    pub address: SocketAddr,
    pub counts: Arc<Counts>,
    _server: Server,
    _dir: tempfile::TempDir,
}

/// Times that a test can wait for.
pub fn short() -> Times {
    let brief = Duration::from_millis(20);
    Times {
        token: brief,
        unknown: brief,
        allowed: brief,
        denied: brief,
        limit: Duration::from_secs(1),
    }
}

impl World {
    pub async fn new(times: Times, tls: Tls) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cluster = ApiServer::start(dir.path());
        cluster.with(|store| {
            for bits in 0..1 << NAMESPACES.len() {
                let user = format!("user-{bits}");
                store.users.accept(&format!("token-{bits}"), &user, &["system:authenticated"]);
                set(bits).iter().for_each(|namespace| store.users.allow(&user, namespace));
            }
            store.users.accept("token-all", "ops", &["ops-group"]);
            store.users.allow("ops-group", "");
            // A service account, whose namespace has nothing here.
            store.users.accept("token-robot", "system:serviceaccount:ns-omega:robot", &[]);
            store.users.allow("system:serviceaccount:ns-omega:robot", "ns-omega");
        });
        let reviews = ClusterClient::new(cluster.access(), Duration::from_millis(500));
        let counts = Arc::<Counts>::default();
        let source = Scripted::new(script());
        let authorisation = Authorisation::kubernetes_for(reviews, Arc::clone(&counts), times);
        let (server, address) =
            serve_to(source.clone(), authorisation, tls, Arc::clone(&counts)).await;
        World { source, cluster, address, counts, _server: server, _dir: dir }
    }

    /// Who has this token.
    pub fn client(&self, token: &str) -> Client {
        Client::new(Endpoint::Plain(self.address)).with_token(token)
    }
}

/// An allocation of this namespace, or of a tenant that nobody named.
pub fn behind(namespace: &str) -> Behind {
    let mark = if namespace.is_empty() { NOBODY } else { namespace };
    let pod = if namespace.is_empty() { String::new() } else { format!("{mark} pod") };
    Behind { allocation_id: format!("{mark} id"), namespace: namespace.to_owned(), pod }
}

fn all_behind() -> Vec<Behind> {
    NAMESPACES.into_iter().chain([""]).map(behind).collect()
}

fn holder(namespace: &str) -> Holder {
    let mark = if namespace.is_empty() { NOBODY } else { namespace };
    Holder {
        namespace: namespace.to_owned(),
        pod: format!("{mark} pod"),
        container: format!("{mark} container"),
    }
}

fn claim(namespace: &str) -> Claim {
    let name = format!("{namespace} claim");
    Claim { namespace: namespace.to_owned(), name, ..Claim::default() }
}

fn lines(namespace: &str) -> Vec<TrailLine> {
    let others = NAMESPACES.iter().map(|name| holder(name));
    let of_others = others.map(|holder| TrailLine { holder: Some(holder), ..TrailLine::default() });
    let common = TrailLine { reason: everybody(), by: everybody(), ..TrailLine::default() };
    let own =
        TrailLine { reason: format!("{namespace} own"), reason_is_own: true, ..common.clone() };
    let behind = all_behind().into_iter();
    let behind = behind.map(|other| TrailLine { behind: Some(other), ..own.clone() });
    of_others.chain([common, own.clone()]).chain(behind).collect()
}

fn incidents(namespace: &str) -> Vec<Incident> {
    let common = Incident { reason: everybody(), ..Incident::default() };
    let own =
        Incident { reason: format!("{namespace} own"), reason_is_own: true, ..common.clone() };
    let behind = all_behind().into_iter();
    let behind = behind.map(|other| Incident { behind: Some(other), ..own.clone() });
    [common].into_iter().chain(behind).collect()
}

fn placement() -> Placement {
    Placement { stands: vec![gpu(0), gpu(1)], ..Placement::default() }
}

pub fn story(namespace: &str) -> Story {
    let now = Allocation {
        holder: Some(holder(namespace)),
        other_holders: NAMESPACES.iter().map(|name| holder(name)).collect(),
        claim: Some(claim(namespace)),
        compute: Some(Compute::default()),
        ..Allocation::default()
    };
    let neighbour = |who| Neighbour { who, ..Neighbour::default() };
    let limit = Limit {
        set_unix_ms: 1,
        set_by: everybody(),
        memory_origin: Limit::set(1, &everybody()),
        cores_origin: Limit::set(1, &everybody()),
        ..Limit::default()
    };
    Story {
        holder: Some(holder(namespace)),
        now: Some(now),
        placement: Some(placement()),
        limits: vec![limit],
        neighbours: all_behind().into_iter().map(neighbour).collect(),
        enforcement: Some(Enforcement { warnings: vec![everybody()], ..Enforcement::default() }),
        incidents: incidents(namespace),
        trail: lines(namespace),
        ..Story::default()
    }
}

pub fn explanation(allocations: Vec<Story>, about_gpu: bool) -> Explanation {
    let gpu = RootGpu { cordon: everybody(), lease_holder: everybody(), ..RootGpu::default() };
    let gpu = GpuStory { gpu: Some(gpu), trail: lines(""), ..GpuStory::default() };
    Explanation {
        allocations,
        gpus: about_gpu.then_some(gpu).into_iter().collect(),
        remarks: vec![everybody()],
        ..Explanation::default()
    }
}
