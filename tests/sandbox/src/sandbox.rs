//! A sandbox: nodes, pods, and what becomes of each command.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use tessera_model::printable;
use tessera_run::SIM_CONTEXT_OVERHEAD;

use super::command::{Command, RunArgs, What};
use super::console::Console;
use super::container::Means;
use super::node::{Node, last_lines};
use super::pod::Placement;
use super::pod::{Pod, State, Ways, Work};
use super::print;
use super::scratch::Scratch;

/// More than a bare context takes on any GPU, bytes.
const REAL_CONTEXT: u64 = 1 << 30;

/// What became of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// An exit status.
    pub code: u8,
    pub text: String,
    pub ends: bool,
}

impl Reply {
    pub fn done(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    pub fn failed(text: impl Into<String>) -> Self {
        Self { code: 1, text: text.into(), ends: false }
    }

    /// The same for a terminal: much of it is containers' own words.
    pub fn printable(self) -> Self {
        Self { text: printable::lines(&self.text).into_owned(), ..self }
    }
}

#[derive(Debug)]
pub struct Sandbox {
    pub nodes: Vec<Node>,
    /// Its pods, the oldest first.
    pub pods: Vec<Pod>,
    pub means: Means,
    /// `tessera-tenant`.
    pub program: PathBuf,
    /// What its GPUs are, for people.
    pub described: String,
    /// The page over all nodes, where there are several.
    pub console: Option<Console>,
    /// What was seen of each pod and plugin, so that an end is reported once.
    reported: Vec<String>,
    /// After everything that lives in it.
    pub scratch: Scratch,
}

impl Sandbox {
    /// One of these nodes, without pods.
    pub fn new(
        nodes: Vec<Node>,
        means: Means,
        program: PathBuf,
        described: String,
        (console, scratch): (Option<Console>, Scratch),
    ) -> Self {
        let (pods, reported) = (Vec::new(), Vec::new());
        Self { nodes, pods, means, program, described, console, reported, scratch }
    }

    pub async fn obey(&mut self, command: Command) -> Reply {
        let reply = self.try_to(command).await;
        reply.unwrap_or_else(|error| Reply::failed(format!("{error:#}"))).printable()
    }

    async fn try_to(&mut self, command: Command) -> anyhow::Result<Reply> {
        match command {
            Command::Run(args) => self.run(args).await.map(Reply::done),
            Command::Rm { name } => {
                let pod = self.pods.remove(self.find(&name)?);
                let (node, full) = (pod.node, pod.full_name());
                pod.remove(&self.nodes[node].kubelet).await;
                self.nodes[node].unprepare(&full).await;
                Ok(Reply::done(format!("{full}: removed")))
            }
            Command::List => Ok(Reply::done(print::list(self))),
            Command::Logs { what, node, lines } => {
                let file = match what.as_str() {
                    "plugin" => self.node(node.as_deref())?.log(),
                    name => self.pods[self.find(name)?].log.clone(),
                };
                Ok(Reply::done(last_lines(&file, lines)))
            }
            Command::Wait { name, limit } => {
                let at = self.find(&name)?;
                let pod = &mut self.pods[at];
                let full = pod.full_name();
                match pod.wait_for(limit).await {
                    State::Running => bail!("{full} still runs after {limit:?}"),
                    State::Ended(0) => Ok(Reply::done(format!("{full}: ended"))),
                    State::Ended(code) => {
                        bail!("{full} ended with exit code {code}: {}", last_lines(&pod.log, 3))
                    }
                }
            }
            Command::Start(what) => self.start(&what).await.map(Reply::done),
            Command::Kill(what) => self.kill(&what).await.map(Reply::done),
            Command::Restart(what) if what.what == "kubelet" => {
                let node = self.node(what.node.as_deref())?;
                node.kubelet.restart().await.context("kubelet does not come back")?;
                if node.plugin_runs() {
                    node.await_offered().await?;
                }
                Ok(Reply::done(format!("kubelet of {}: restarted", node.spec.name)))
            }
            Command::Restart(what) => {
                match what.what.as_str() {
                    "plugin" => self.node(what.node.as_deref())?.stop_plugin().await,
                    _ => {
                        let at = self.find(&what.what)?;
                        self.pods[at].kill().await;
                    }
                }
                self.start(&what).await.map(Reply::done)
            }
            Command::Xid { gpu, code, node } => {
                self.control(node.as_deref(), &["xid", &gpu, &code.to_string()])?;
                Ok(Reply::done(format!(
                    "GPU {gpu}: XID {code}; `tessera sandbox status` says what comes of it"
                )))
            }
            Command::Lose { gpu, node } => {
                self.control(node.as_deref(), &["lose", &gpu])?;
                Ok(Reply::done(format!(
                    "GPU {gpu}: fell off the bus; `tessera sandbox restore {gpu}` brings it back"
                )))
            }
            Command::Restore { gpu, node } => {
                self.control(node.as_deref(), &["restore", &gpu])?;
                Ok(Reply::done(format!(
                    "GPU {gpu}: reset; the plugin sells it again after health.recovery without trouble, and `tessera sandbox status` \
                     says what it is now"
                )))
            }
            Command::Where => Ok(Reply::done(print::greeting(self, false))),
            Command::Exit => Ok(Reply { ends: true, ..Reply::default() }),
            Command::Tessera(asked) => self.relayed(asked.words()),
        }
    }

    /// The node of this name; without a name, the only one.
    fn node(&mut self, name: Option<&str>) -> anyhow::Result<&mut Node> {
        let at = self.node_at(name)?;
        Ok(&mut self.nodes[at])
    }

    fn node_at(&self, name: Option<&str>) -> anyhow::Result<usize> {
        let names: Vec<&str> = self.nodes.iter().map(|node| node.spec.name.as_str()).collect();
        let names = names.join(", ");
        match name {
            Some(name) => {
                let at = self.nodes.iter().position(|node| node.spec.name == name);
                at.with_context(|| format!("no node is called {name:?}; there are {names}"))
            }
            None if self.nodes.len() == 1 => Ok(0),
            None => bail!("which node? Add --node with one of {names}"),
        }
    }

    /// A pod, called `NAMESPACE/NAME` as lists have it, or `NAME` in the namespace `default`.
    fn find(&self, name: &str) -> anyhow::Result<usize> {
        let (namespace, name) = name.split_once('/').unwrap_or(("default", name));
        let is_it = |pod: &Pod| pod.namespace == namespace && pod.name == name;
        if let Some(at) = self.pods.iter().position(is_it) {
            return Ok(at);
        }
        let names: Vec<String> = self.pods.iter().map(Pod::full_name).collect();
        match names.as_slice() {
            [] => bail!("there is no pod yet; `tessera sandbox run {name}` places one"),
            names => bail!("no pod is called {namespace}/{name}; there are {}", names.join(", ")),
        }
    }

    async fn run(&mut self, args: RunArgs) -> anyhow::Result<String> {
        let RunArgs { name, namespace, gpu, share, claim, node, load, memory, command } = args;
        let full = format!("{namespace}/{name}");
        let taken = self.pods.iter().any(|pod| pod.full_name() == full);
        anyhow::ensure!(!taken, "{full} is there already; `tessera sandbox rm {full}` removes it");
        let count = if share.is_some() { 1 } else { usize::from(gpu) };
        let (at, resource) = match claim {
            Some(size) => (self.with_claims(node.as_deref())?, format!("claim {size}")),
            None => self.choose(node.as_deref(), share.as_deref(), count)?,
        };
        let dir = self.scratch.dir(&format!("pods/{namespace}.{name}"))?;
        let log = self.scratch.dir("logs")?.join(format!("{namespace}.{name}"));
        let (asked, pod) = ((resource.as_str(), count), (namespace.as_str(), name.as_str()));
        let placement = match claim {
            Some(size) => {
                self.nodes[at].claim(pod, size, dir).await.with_context(|| full.clone())?
            }
            None => Placement::of(&self.nodes[at].kubelet, pod, asked, dir).await?,
        };
        let node = &self.nodes[at];
        let work =
            if command.is_empty() { Work::Load(load, memory) } else { Work::Command(command) };
        let mut pod = Pod::new((namespace, name), (at, resource), placement, work, log);
        let ways = ways(&self.means, &self.program, &self.scratch.path, node);
        if let Err(error) = pod.start(&ways).await {
            pod.remove(&node.kubelet).await;
            self.nodes[at].unprepare(&full).await;
            return Err(error.context(full));
        }
        let text = print::placed(&pod, node);
        self.nodes[at].await_named(&pod.namespace, &pod.name).await;
        self.pods.push(pod);
        Ok(text)
    }

    /// The node for a claim: that of the name, or the first that serves claims.
    fn with_claims(&self, node: Option<&str>) -> anyhow::Result<usize> {
        let at = match node {
            Some(name) => self.node_at(Some(name))?,
            None => self.nodes.iter().position(|node| node.dra.is_some()).unwrap_or(0),
        };
        anyhow::ensure!(
            self.nodes[at].dra.is_some(),
            "no GPU of {} is sold by claims: start the sandbox with --dra, or with a configuration that has \
             dra.enabled",
            self.nodes[at].spec.name
        );
        Ok(at)
    }

    /// Which node, and the whole name of the resource.
    fn choose(
        &self,
        node: Option<&str>,
        share: Option<&str>,
        count: usize,
    ) -> anyhow::Result<(usize, String)> {
        let only = node.map(|name| self.node_at(Some(name))).transpose()?;
        let candidates: Vec<usize> =
            only.map_or_else(|| (0..self.nodes.len()).collect(), |at| vec![at]);
        let first = &self.nodes[candidates[0]];
        let sold = first.resources();
        let resource = match share {
            None => first.config.resource.name.clone(),
            Some(share) => {
                let is_it = |one: &&String| *one == share || one.rsplit('/').next() == Some(share);
                let found = sold.iter().find(is_it).cloned();
                found.with_context(|| {
                    format!(
                        "no share is called {share:?}; the configuration sells {}",
                        sold.join(", ")
                    )
                })?
            }
        };
        let room = |at: &&usize| self.nodes[**at].free(&resource) >= count;
        if let Some(at) = candidates.iter().find(room) {
            return Ok((*at, resource));
        }
        let by_claims = |at: &usize| {
            self.nodes[*at].dra.is_some() && self.nodes[*at].kubelet.devices(&resource).is_empty()
        };
        anyhow::ensure!(
            !candidates.iter().all(by_claims),
            "all GPUs are sold by claims here: tessera sandbox run NAME --claim memory=4Gi,cores=30"
        );
        let has = |resource: &str| {
            candidates.iter().any(|at| !self.nodes[*at].kubelet.devices(resource).is_empty())
        };
        let others: Vec<&str> =
            sold.iter().map(String::as_str).filter(|one| **one != *resource && has(one)).collect();
        anyhow::ensure!(
            has(&resource) || others.is_empty(),
            "no GPU is sold as {resource} here: ask for --share with one of {}",
            others.join(", ")
        );
        let free = |at: &usize| {
            let node = &self.nodes[*at];
            format!("{} has {} free", node.spec.name, node.free(&resource))
        };
        let free: Vec<String> = candidates.iter().map(free).collect();
        bail!(
            "{count} of {resource} do not fit: {}; remove a pod, or ask for fewer",
            free.join(", ")
        )
    }

    async fn start(&mut self, what: &What) -> anyhow::Result<String> {
        if what.what == "plugin" {
            let node = self.node(what.node.as_deref())?;
            node.start_plugin().await?;
            let pid = node.plugin_pid().unwrap_or(0);
            return Ok(format!("plugin of {}: runs, pid {pid}", node.spec.name));
        }
        let at = self.find(&what.what)?;
        let pod = &mut self.pods[at];
        let full = pod.full_name();
        anyhow::ensure!(pod.look() != State::Running, "{full} runs already");
        let node = &self.nodes[pod.node];
        // Mounts of the old container went with its processes.
        let scratch = pod.placement.surroundings.scratch.clone();
        pod.placement.restart(&node.kubelet, scratch).await?;
        let ways = ways(&self.means, &self.program, &self.scratch.path, node);
        pod.start(&ways).await.with_context(|| full.clone())?;
        Ok(format!("{full}: its container runs again"))
    }

    async fn kill(&mut self, what: &What) -> anyhow::Result<String> {
        match what.what.as_str() {
            "kubelet" => {
                bail!(
                    "kubelet is part of the sandbox; `tessera sandbox restart kubelet` is what it can do"
                )
            }
            "plugin" => {
                let node = self.node(what.node.as_deref())?;
                anyhow::ensure!(node.plugin_runs(), "no plugin runs on {}", node.spec.name);
                node.kill_plugin().await;
                Ok(format!(
                    "plugin of {}: killed; `tessera sandbox start plugin` brings it back",
                    node.spec.name
                ))
            }
            name => {
                let at = self.find(name)?;
                let pod = &mut self.pods[at];
                pod.kill().await;
                Ok(format!(
                    "{}: killed; `tessera sandbox start {name}` brings it back",
                    pod.full_name()
                ))
            }
        }
    }

    fn control(&mut self, node: Option<&str>, args: &[&str]) -> anyhow::Result<()> {
        let node = self.node(node)?;
        let simulation = node.spec.simulation.as_ref().context("its GPUs are not simulated")?;
        simulation.control(args).map(drop)
    }

    /// Whose plugin a command of `tessera` is for, and the command: for the relay.
    fn relayed(&self, mut words: Vec<String>) -> anyhow::Result<Reply> {
        let node = take_option(&mut words, "--node");
        let (first, rest) = words.split_first().context("no command")?;
        let is_named =
            |pod: &&Pod| rest.iter().any(|one| *one == pod.name || *one == pod.full_name());
        let of_pods: BTreeSet<usize> =
            self.pods.iter().filter(is_named).map(|pod| pod.node).collect();
        let at: Vec<usize> = match (node, first.as_str()) {
            (Some(name), _) => vec![self.node_at(Some(&name))?],
            _ if of_pods.len() == 1 => of_pods.into_iter().collect(),
            (_, "status" | "config" | "waste" | "recommend") => (0..self.nodes.len()).collect(),
            _ => vec![self.node_at(None)?],
        };
        let asked: Vec<_> = at.into_iter().map(|at| self.nodes[at].asked()).collect();
        Ok(Reply::done(serde_json::to_string(&(asked, words))?))
    }

    /// What has ended by itself since the last time, a line each.
    pub fn news(&mut self) -> Vec<String> {
        let mut now = Vec::new();
        for pod in &mut self.pods {
            if let State::Ended(code) = pod.look() {
                now.push(format!("{}: its container ended with exit code {code}", pod.full_name()));
            }
        }
        for node in &mut self.nodes {
            if !node.plugin_runs() {
                now.push(format!("plugin of {}: does not run", node.spec.name));
            }
        }
        let fresh = now.iter().filter(|line| !self.reported.contains(line)).cloned().collect();
        self.reported = now;
        fresh
    }

    /// Marks what is known as reported.
    pub fn settle(&mut self) {
        let _ = self.news();
    }

    /// Ends everything, pods first.
    pub async fn strike(self) {
        let Self { mut nodes, pods, console, scratch, .. } = self;
        drop(console);
        for mut pod in pods {
            pod.kill().await;
            let (node, full) = (pod.node, pod.full_name());
            pod.remove(&nodes[node].kubelet).await;
            nodes[node].unprepare(&full).await;
        }
        for node in nodes {
            node.strike().await;
        }
        let sockets = ["control.sock", "pods"];
        for name in sockets {
            let path = scratch.path.join(name);
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
        }
        drop(scratch);
    }
}

fn ways<'a>(means: &Means, program: &'a Path, mark: &'a Path, node: &Node) -> Ways<'a> {
    Ways { means: *means, program, mark, overhead: overhead(node) }
}

/// Bytes that a load leaves free for its context.
pub fn overhead(node: &Node) -> u64 {
    let least = if node.spec.simulation.is_some() { SIM_CONTEXT_OVERHEAD } else { REAL_CONTEXT };
    node.config.gpus.context_overhead_bytes.unwrap_or(0).max(least)
}

/// Takes `--name VALUE` or `--name=VALUE` out of the words.
fn take_option(words: &mut Vec<String>, name: &str) -> Option<String> {
    let at = words.iter().position(|word| {
        word == name || word.strip_prefix(name).is_some_and(|rest| rest.starts_with('='))
    })?;
    let word = words.remove(at);
    match word.split_once('=') {
        Some((_, value)) => Some(value.to_owned()),
        None if at < words.len() => Some(words.remove(at)),
        None => None,
    }
}
