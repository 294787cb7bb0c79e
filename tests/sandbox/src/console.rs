//! One page over all nodes of a sandbox, as `tessera console` is one over a cluster: each node's API is asked on the
//! loopback interface.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use tessera_fleet::merge::ByNode;
use tessera_fleet::{AskError, Question, Why, merge};
use tessera_system::locks::lock;
use tessera_system::terminal;
use tessera_view::advice::{Recommendations, Waste};
use tessera_view::explain::Explanations;
use tessera_view::fixtures::{Layout as Size, MadeUp};
use tessera_view::fleet::{Entry, Fleet};
use tessera_view::trace::Trace;
use tessera_view::{API_VERSION, history};
use tessera_web::Source;
use tessera_web::client::{Client, ClientError, Endpoint};
use tessera_web::fixtures::Fixture;
use tessera_web::server::{Options, Server};
use tessera_web::source::{Answer, Scope};
use tokio::task::JoinSet;

use super::control::Ends;
use super::node::Node;
use super::start::Layout;

/// How often a page hears of changes, as of a console.
const INTERVAL: Duration = Duration::from_secs(2);
/// How long a node may take to answer.
const LIMIT: Duration = Duration::from_secs(2);
/// How long the server may take until it listens.
const BOUND: Duration = Duration::from_secs(5);

/// A page that is served.
#[derive(Debug)]
pub struct Console {
    address: SocketAddr,
    _server: Server,
}

impl Console {
    /// Over these nodes, on a port that is free.
    pub async fn over(nodes: &[Node]) -> anyhow::Result<Self> {
        let one = |node: &Node| {
            let client = Client::new(Endpoint::Plain(node.api?)).with_limit(LIMIT);
            Some(Asked { name: node.spec.name.clone(), client, last: Mutex::default() })
        };
        let nodes = Nodes(nodes.iter().filter_map(one).collect());
        Self::of(Arc::new(nodes)).await
    }

    async fn of(source: Arc<dyn Source>) -> anyhow::Result<Self> {
        let listen = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))];
        let options = Options { listen, interval: INTERVAL, ..Options::new(source) };
        let server = Server::start(options).context("the page cannot be served")?;
        let bound = tokio::time::timeout(BOUND, server.bound()).await.ok().flatten();
        let address = bound.context("the page has no port")?;
        Ok(Self { address, _server: server })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// A node that is asked, and what it last said.
struct Asked {
    name: String,
    client: Client,
    last: Mutex<Option<Entry>>,
}

struct Nodes(Vec<Asked>);

/// How long a trace may take beyond its time.
const TRACED: Duration = Duration::from_secs(20);

impl Asked {
    /// Its entry: of now, or its last one with why there is none.
    async fn entry(&self) -> Entry {
        let answer = self.client.get::<Fleet>("/api/v1/fleet").await;
        let mut last = lock(&self.last);
        let view = answer.map(|fleet| fleet.nodes.into_iter().find_map(|entry| entry.view));
        match view {
            Ok(Some(view)) => {
                let entry = Entry {
                    node: self.name.clone(),
                    answers: true,
                    answered_unix_ms: unix_ms(),
                    error: String::new(),
                    view: Some(view),
                };
                *last = Some(entry.clone());
                entry
            }
            other => {
                let error = match other {
                    Err(error) => error.to_string(),
                    Ok(_) => "it answers and says nothing of itself".to_owned(),
                };
                let known = last.clone().unwrap_or_default();
                Entry { node: self.name.clone(), answers: false, error, ..known }
            }
        }
    }
}

impl Nodes {
    /// Those of this name; all for none.
    fn named(&self, node: &str) -> impl Iterator<Item = &Asked> {
        self.0.iter().filter(move |one| node.is_empty() || one.name == node)
    }

    /// Asks those of this name one thing each.
    async fn each<T: serde::de::DeserializeOwned>(
        &self,
        node: &str,
        question: &Question,
    ) -> Vec<(String, Result<T, AskError>)> {
        let (mut all, path) = (Vec::new(), question.target());
        for one in self.named(node) {
            all.push((one.name.clone(), one.client.get(&path).await.map_err(refused)));
        }
        all
    }
}

impl Source for Nodes {
    fn fleet(&self) -> Answer<'_, Fleet> {
        Box::pin(async {
            let mut nodes = Vec::new();
            for one in &self.0 {
                nodes.push(one.entry().await);
            }
            let (api_version, name) = (API_VERSION.to_owned(), "sandbox".to_owned());
            Ok(Fleet { api_version, name, at_unix_ms: unix_ms(), nodes })
        })
    }

    fn history<'a>(&'a self, node: &'a str, asked: history::Query) -> Answer<'a, history::Answer> {
        Box::pin(
            async move { Ok(merge::history(self.each(node, &Question::history(&asked)).await)?) },
        )
    }

    fn explain<'a>(&'a self, node: &'a str, subject: &'a str) -> Answer<'a, Explanations> {
        Box::pin(async move {
            Ok(merge::explanations(self.each(node, &Question::explain(subject, "")).await)?)
        })
    }

    fn recommend(&self, scope: Scope) -> Answer<'_, Recommendations> {
        Box::pin(async move {
            // The workload of a pod may have others on nodes that do not know this one.
            let all = Scope { pod: String::new(), ..scope.clone() };
            let advised = self.each("", &Question::of_scope("recommend", &all)).await;
            let by_node = ByNode::of(advised, &scope.pod);
            let (nodes, since_unix_ms) = by_node.needed();
            let namespace = scope.namespace.clone();
            let window = history::Query { namespace, since_unix_ms, ..history::Query::default() };
            let path = Question::history(&window).target();
            let mut seen = Vec::new();
            for one in self.0.iter().filter(|one| nodes.contains(&one.name)) {
                let view = one.entry().await.view.unwrap_or_default();
                let history = one.client.get::<history::Answer>(&path).await.map_err(refused);
                seen.push((one.name.clone(), history.map(|history| (view, history))));
            }
            Ok(by_node.judged(seen, &scope, unix_ms()))
        })
    }

    fn waste(&self, scope: Scope) -> Answer<'_, Waste> {
        Box::pin(async move {
            let wasted = self.each("", &Question::of_scope("waste", &scope)).await;
            Ok(merge::waste(wasted, scope.since_unix_ms, unix_ms()))
        })
    }

    fn trace<'a>(&'a self, node: &'a str, seconds: u32) -> Answer<'a, Trace> {
        Box::pin(async move {
            let path = Question::trace("", seconds).target();
            let limit = TRACED + Duration::from_secs(seconds.into());
            // At the same time.
            let mut asked = JoinSet::new();
            for one in self.named(node) {
                let (name, path) = (one.name.clone(), path.clone());
                let client = one.client.clone().with_limit(limit);
                asked.spawn(async move { (name, client.get(&path).await.map_err(refused)) });
            }
            let (traces, _) = merge::answered(asked.join_all().await)?;
            Ok(Trace::joined(traces))
        })
    }
}

fn refused(error: ClientError) -> AskError {
    match error {
        ClientError::Refused(problem) if problem.code == 404 => Why::Unknown.says(problem.error),
        ClientError::Refused(problem) if problem.code == 400 => Why::Invalid.says(problem.error),
        other => Why::Silent.says(other.to_string()),
    }
}

fn unix_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

/// As `docs/benchmarks.md` measures it: most nodes, and GPUs of each.
const MOST: (u32, u32) = (1000, 16);
/// Tenants of a GPU.
const TENANTS: usize = 10;
/// Time that histories go back, milliseconds.
const PAST_MS: i64 = 7 * 24 * 3_600_000;

/// Serves the page of a fleet that is made up, any number of nodes without a plugin, until it is asked to end.
pub async fn made_up(layout: Layout, ends: &Ends) -> anyhow::Result<ExitCode> {
    let (nodes, gpus) = MOST;
    anyhow::ensure!(
        layout.nodes <= nodes && layout.gpus <= gpus,
        "a made-up fleet has at most {nodes} nodes of {gpus} GPUs, not {layout}"
    );
    let now = unix_ms();
    let size = Size {
        nodes: usize::try_from(layout.nodes)?,
        gpus: usize::try_from(layout.gpus)?,
        tenants: TENANTS,
        since_unix_ms: now - PAST_MS,
        ..Size::default()
    };
    let source = Fixture::new(MadeUp::new(size, now));
    source.run();
    let console = Console::of(Arc::new(source)).await?;
    terminal::print(&format!(
        "a made-up fleet of {layout}: nothing of it exists\n\npage  http://{}/\nAPI   curl -s http://{}/api/v1/fleet\n\n\
         Ctrl-C ends it.\n",
        console.address(),
        console.address()
    ))?;
    ends.wait().await;
    Ok(ExitCode::SUCCESS)
}
