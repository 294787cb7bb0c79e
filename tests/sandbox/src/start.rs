//! How a sandbox comes to stand.

use std::path::Path;
use std::str::FromStr;

use anyhow::Context;
use tessera_config::Config;
use tessera_model::quantity::format_bytes;
use tessera_run::{Artefact, find_artefact};
use toml::Table;

use super::Args;
use super::console::Console;
use super::container::Means;
use super::greeting;
use super::machine::{MOST_GPUS, Machine, Simulation};
use super::node::{BadConfiguration, Node, NodeSpec};
use super::sandbox::Sandbox;
use super::scratch::{PREFIX, Scratch};
use super::settings;
use super::values::{self, Values};

/// Most nodes that have plugins of their own.
const MOST_NODES: u32 = 8;

/// How many nodes, and how many GPUs each has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Nodes.
    pub nodes: u32,
    /// GPUs of each.
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
    /// What plugins of their own can be started for.
    ///
    /// # Errors
    /// It is too large.
    pub fn check(self) -> Result<(), String> {
        if self.nodes <= MOST_NODES && self.gpus <= MOST_GPUS {
            return Ok(());
        }
        Err(format!(
            "a sandbox has at most {MOST_NODES} nodes of {MOST_GPUS} GPUs, not {self}; --made-up shows larger \
             fleets on the page"
        ))
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}", self.nodes, self.gpus)
    }
}

/// Starts everything but pods.
///
/// # Errors
/// No artefacts, no directory, a plugin that does not register; [`BadConfiguration`].
pub async fn start(args: &Args, file: Option<&Path>) -> anyhow::Result<Sandbox> {
    let Layout { nodes: count, gpus } = args.layout;
    let machine =
        Machine { gpus, memory: args.memory, name: args.gpu_name.clone(), mig: args.mig.clone() };
    let user = match &args.values {
        Some(values) => {
            let Values { config, aside } = values::read(values)?;
            if !aside.is_empty() {
                let aside = aside.join(", ");
                eprintln!(
                    "note: of {}, `config` alone is used here: not {aside}",
                    values.display()
                );
            }
            config
        }
        None => file.map(read).transpose()?.unwrap_or_default(),
    };
    let file = args.values.as_deref().or(file);
    let user = if args.dra { selling_claims(user)? } else { user };
    let shim = find_artefact(Artefact::Shim, None)?;
    let program = find_artefact(Artefact::Tenant, None)?;
    let mut scratch = match &args.dir {
        Some(dir) => Scratch::named(dir)?,
        None => Scratch::temporary(PREFIX)?,
    };
    scratch.occupy()?;
    if let (Some(file), aside @ [_, ..]) = (file, settings::set_aside(&user).as_slice()) {
        eprintln!("note: {} describes a host; not used here: {}", file.display(), aside.join(", "));
    }
    let of =
        |count: u32, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let described = format!(
        "{} of {} each ({:?}, {}, simulated)",
        of(count, "node"),
        of(gpus, "GPU"),
        machine.name,
        format_bytes(machine.memory)
    );
    let mut nodes = Vec::new();
    for index in 0..usize::try_from(count)? {
        let name = format!("n{index}");
        let dir = scratch.dir(&name)?;
        let simulation = Simulation::of(&dir)?;
        std::fs::write(&simulation.config, machine.toml(index))?;
        simulation.control(&["config"]).map_err(no_such_gpus)?;
        let spec = NodeSpec {
            name,
            dir,
            mark: scratch.path().to_owned(),
            shim: shim.clone(),
            simulation: Some(simulation),
            nvml: None,
            user: user.clone(),
            listens: true,
        };
        let mut node = Node::prepare(spec).await?;
        let checked = if index == 0 { node.check() } else { Ok(()) };
        checked.map_err(|error| in_the_users_words(error, &node, file, &described))?;
        node.start_plugin().await?;
        nodes.push(node);
    }
    greeting::write_prometheus(&nodes, scratch.path())?;
    let means = Means::probe(&scratch.dir("probe")?);
    let console = match nodes.len() {
        1 => None,
        _ => Some(Console::over(&nodes).await?),
    };
    Ok(Sandbox::new(nodes, means, program, described, (console, scratch)))
}

/// What the simulator refuses comes from the command line; that it cannot be run does not.
fn no_such_gpus(error: anyhow::Error) -> anyhow::Error {
    if error.root_cause().is::<std::io::Error>() {
        return error;
    }
    let text = format!(
        "the simulator has no such GPUs: {error:#}; change --memory (16Gi is the default), --gpu-name, --mig or \
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
fn read(file: &Path) -> anyhow::Result<Table> {
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
        assert!(Layout { nodes: MOST_NODES, gpus: MOST_GPUS }.check().is_ok());
        let large = Layout { nodes: MOST_NODES + 1, gpus: 1 };
        assert!(large.check().unwrap_err().contains("--made-up"));
    }
}
