//! How a sandbox comes to stand.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Context;
use tessera_config::Config;
use tessera_model::quantity::format_bytes;
use tessera_run::{Artefact, find_artefact};
use toml::Table;

use super::Args;
use super::console::Console;
use super::container::Means;
use super::machine::{self, MOST_GPUS, Machine, Mig, Simulation};
use super::node::{BadConfiguration, Node, NodeSpec};
use super::print;
use super::sandbox::Sandbox;
use super::scratch::{PREFIX, Scratch};

/// Most nodes that have plugins of their own.
const MOST_NODES: u32 = 8;

/// How many nodes, and how many GPUs each has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub nodes: u32,
    pub gpus: u32,
}

impl FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|number| *number > 0);
        let parts = text.split_once(['x', '×']);
        let parts = parts.and_then(|(nodes, gpus)| Some((number(nodes)?, number(gpus)?)));
        let (nodes, gpus) = parts.ok_or("write NODESxGPUS: 1x2, or 4x8")?;
        Ok(Self { nodes, gpus })
    }
}

impl Layout {
    /// What plugins of their own can be started for, with these instances.
    pub fn check(self, mig: &[Mig]) -> Result<(), String> {
        if let Some(gpu) = mig.iter().filter_map(|mig| mig.gpu).find(|gpu| *gpu >= self.gpus) {
            return Err(format!(
                "--mig {gpu}=…: a node has GPUs 0 to {} (--layout {self})",
                self.gpus - 1
            ));
        }
        if self.nodes <= MOST_NODES && self.gpus <= MOST_GPUS {
            return Ok(());
        }
        Err(format!("a sandbox has at most {MOST_NODES} nodes of {MOST_GPUS} GPUs, not {self}"))
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.nodes, self.gpus)
    }
}

/// What a sandbox is made of.
#[derive(Clone, Debug)]
pub struct Plan {
    pub nodes: u32,
    /// GPUs of each node; without, one node with this machine's own.
    pub machine: Option<Machine>,
    /// The user's configuration.
    pub user: Table,
    pub file: Option<PathBuf>,
    /// Whether metrics and API are served, on ports that are free.
    pub listens: bool,
}

/// Starts everything but pods.
pub async fn start(args: &Args, file: Option<&Path>) -> anyhow::Result<Sandbox> {
    let Layout { nodes, gpus } = args.layout;
    // Profiles are named by the memory that an A100 or H100 has for them.
    let usual = if args.mig.is_empty() { Machine::default().memory } else { 80 << 30 };
    let memory = args.memory.unwrap_or(usual);
    let machine = Machine { gpus, memory, name: args.gpu_name.clone(), mig: args.mig.clone() };
    let user = file.map(read).transpose()?.unwrap_or_default();
    let user = if args.dra { selling_claims(user)? } else { user };
    let scratch = match &args.dir {
        Some(dir) => Scratch::named(dir)?,
        None => Scratch::temporary(PREFIX)?,
    };
    let (machine, file) = (Some(machine), file.map(Path::to_owned));
    stand(Plan { nodes, machine, user, file, listens: true }, scratch).await
}

pub async fn stand(plan: Plan, mut scratch: Scratch) -> anyhow::Result<Sandbox> {
    let Plan { nodes: count, machine, user, file, listens } = plan;
    let file = file.as_deref();
    let shim = find_artefact(Artefact::SHIM, None)?;
    let program = find_artefact(Artefact::TENANT, None)?;
    scratch.occupy()?;
    if let (Some(file), aside @ [_, ..]) = (file, machine::set_aside(&user).as_slice()) {
        eprintln!("note: {} describes a host; not used here: {}", file.display(), aside.join(", "));
    }
    let of =
        |count: u32, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let described = machine.as_ref().map_or("this machine's GPUs".to_owned(), |machine| {
        format!(
            "{} of {} each ({:?}, {}, simulated)",
            of(count, "node"),
            of(machine.gpus, "GPU"),
            machine.name,
            format_bytes(machine.memory)
        )
    });
    let mut nodes = Vec::new();
    for index in 0..usize::try_from(count)? {
        let name = format!("n{index}");
        let dir = scratch.dir(&name)?;
        let simulation = machine.as_ref().map(|_| Simulation::of(&dir)).transpose()?;
        if let (Some(machine), Some(simulation)) = (&machine, &simulation) {
            std::fs::write(&simulation.config, machine.toml(index))?;
            simulation.control(&["config"]).map_err(no_such_gpus)?;
        }
        let (mark, shim, user) = (scratch.path.to_owned(), shim.clone(), user.clone());
        let spec = NodeSpec { name, dir, mark, shim, simulation, user, listens };
        let mut node = Node::prepare(spec).await?;
        let checked = if index == 0 { node.check() } else { Ok(()) };
        checked.map_err(|error| in_the_users_words(error, &node, file, &described))?;
        node.start_plugin().await?;
        nodes.push(node);
    }
    print::write_prometheus(&nodes, &scratch.path)?;
    let means = Means::probe(&scratch.dir("probe")?);
    let console = match nodes.len() {
        1 => None,
        _ => Some(Console::over(&nodes, &scratch.dir("cluster")?).await?),
    };
    Ok(Sandbox::new(nodes, means, program, described, (console, scratch)))
}

/// What the simulator refuses comes from the command line; that it cannot be run does not.
fn no_such_gpus(error: anyhow::Error) -> anyhow::Error {
    if error.root_cause().is::<std::io::Error>() {
        return error;
    }
    let text = format!(
        "the simulator has no such GPUs: {error:#}; change --memory, --gpu-name, --mig or \
         --layout"
    );
    BadConfiguration(text).into()
}

/// The same with `dra.enabled`.
fn selling_claims(mut user: Table) -> anyhow::Result<Table> {
    let dra = user.entry("dra").or_insert_with(|| Table::new().into());
    let dra = dra.as_table_mut().context("[dra] is no table")?;
    dra.insert("enabled".to_owned(), true.into());
    Ok(user)
}

/// The user's configuration, sound by itself.
pub fn read(file: &Path) -> anyhow::Result<Table> {
    // Its errors have the file's lines.
    Config::find(Some(file))?;
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    text.parse().with_context(|| format!("cannot read {}", file.display()))
}

/// Problems of what was written for the plugin, as problems of what the user wrote.
fn in_the_users_words(
    error: anyhow::Error,
    node: &Node,
    file: Option<&Path>,
    described: &str,
) -> anyhow::Error {
    let Some(BadConfiguration(text)) = error.downcast_ref() else { return error };
    let written = node.file().display().to_string();
    let named =
        file.map_or_else(|| "the configuration".to_owned(), |file| file.display().to_string());
    let of_line = |line: &str| match line.strip_prefix(&written) {
        // The number is of a line that nobody has written.
        Some(rest) => {
            let rest = rest.trim_start_matches(|c: char| c == ':' || c.is_ascii_digit());
            format!("{named}: {}", rest.trim_start())
        }
        None => line.to_owned(),
    };
    let lines: Vec<String> = text.lines().map(of_line).collect();
    BadConfiguration(format!(
        "{}\nthis was tried on {described}; --layout, --memory, --gpu-name and --mig give other GPUs",
        lines.join("\n")
    ))
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_nodes_times_gpus() {
        assert_eq!("4x8".parse(), Ok(Layout { nodes: 4, gpus: 8 }));
        assert_eq!(Layout { nodes: 4, gpus: 8 }.to_string(), "4x8");
        for wrong in ["", "4", "x", "0x1", "1x0", "4x8x2", "-1x2"] {
            assert!(wrong.parse::<Layout>().is_err(), "{wrong}");
        }
        assert!(Layout { nodes: MOST_NODES, gpus: MOST_GPUS }.check(&[]).is_ok());
        let large = Layout { nodes: MOST_NODES + 1, gpus: 1 };
        assert!(large.check(&[]).unwrap_err().contains("at most 8 nodes"));
        let mig = |text: &str| Layout { nodes: 1, gpus: 2 }.check(&[text.parse().unwrap()]);
        assert!(mig("1=1g.10gb").is_ok() && mig("1g.10gb").is_ok());
        assert!(mig("9=1g.10gb").unwrap_err().contains("GPUs 0 to 1"));
    }
}
