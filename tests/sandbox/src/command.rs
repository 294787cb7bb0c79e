//! What can be asked of a sandbox.

use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use serde::{Deserialize, Serialize};

use super::dra::Size;
use super::pod::Load;

/// A line of a script.
#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(subcommand)]
    command: Command,
}

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand, Serialize, Deserialize)]
pub enum Command {
    /// Place a pod; its container is a real process under the shim
    #[command(
        after_help = "Examples:\n  run chat --load serve\n  run big --gpu 2 --load train --memory 6Gi\n  run small --claim memory=2Gi,cores=10\n  \
                            run mine -- ./my-cuda-program --flag"
    )]
    Run(RunArgs),
    /// Remove a pod; its container ends and what it held is free
    #[command(visible_alias = "delete")]
    Rm {
        /// The pod; `NAMESPACE/NAME` where that is not `default`
        name: String,
    },
    /// List nodes and pods
    #[command(visible_alias = "ls")]
    List,
    /// Print what a pod's container wrote last, or the plugin
    Logs {
        /// The pod, or `plugin`
        what: String,
        /// The plugin's node
        #[arg(long)]
        node: Option<String>,
        /// How many lines
        #[arg(long, default_value_t = 20)]
        lines: usize,
    },
    /// Wait until a pod's container has ended by itself; fail if it ended with an error
    Wait {
        /// The pod
        name: String,
        /// At most so long, seconds
        #[arg(long = "for", value_name = "SECONDS", default_value = "60", value_parser = seconds)]
        limit: Duration,
    },
    /// Start the plugin, or a pod's container, after it ended
    Start(What),
    /// Restart the plugin, kubelet, or a pod's container
    Restart(What),
    /// Kill the plugin, or a pod's container, with SIGKILL
    Kill(What),
    /// Let a GPU have an XID error
    Xid {
        /// The GPU's index; of a MIG instance GPU:INSTANCE
        gpu: String,
        /// The code, 79 for instance
        code: u32,
        /// Its node
        #[arg(long)]
        node: Option<String>,
    },
    /// Let a GPU fall off the bus
    Lose {
        /// The GPU's index
        gpu: String,
        /// Its node
        #[arg(long)]
        node: Option<String>,
    },
    /// Bring a lost GPU back, reset
    Restore {
        /// The GPU's index
        gpu: String,
        /// Its node
        #[arg(long)]
        node: Option<String>,
    },
    /// Print what to point `tessera`, a browser and Prometheus at
    Where,
    /// End the sandbox
    #[command(visible_alias = "quit")]
    Exit,
    #[command(flatten)]
    Tessera(Tessera),
}

/// All that follows.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Words {
    /// As the same command of `tessera` takes them; its own --help says which
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

macro_rules! tessera {
    ($($Name:ident $name:literal $(, $more:literal)?;)*) => {
        /// Commands of `tessera` by which the plugin of a pod's node is asked, or that of `--node`.
        #[derive(Clone, Debug, PartialEq, Eq, Subcommand, Serialize, Deserialize)]
        pub enum Tessera {
            $(
                #[command(about = concat!("`tessera ", $name, "`" $(, $more)?))]
                $Name(Words),
            )*
        }

        impl Tessera {
            /// With its own name.
            pub fn words(self) -> Vec<String> {
                let (name, Words { words }) = match self {
                    $(Self::$Name(words) => ($name, words),)*
                };
                [vec![name.to_owned()], words].concat()
            }
        }
    };
}

tessera! {
    Status "status", ", of each node";
    Explain "explain";
    Top "top";
    History "history";
    Trace "trace";
    Recommend "recommend", ", of each node";
    Waste "waste", ", of each node";
    Quota "quota";
    Cordon "cordon";
    Uncordon "uncordon";
    Config "config", ", of each node";
}

/// What is started, restarted or killed.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct What {
    /// `plugin`, `kubelet`, or a pod
    pub what: String,
    /// The node of plugin or kubelet
    #[arg(long)]
    pub node: Option<String>,
}

/// A pod that is to be placed.
#[derive(Args, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunArgs {
    /// Its name
    #[arg(value_parser = name)]
    pub name: String,
    /// Its namespace
    #[arg(long, short, default_value = "default", value_parser = name)]
    pub namespace: String,
    /// Replicas of resource.name that it asks for
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub gpu: u16,
    /// One of this share of a layout instead: tessera.dev/gpu-large, or gpu-large
    #[arg(long, value_name = "NAME", conflicts_with = "gpu")]
    pub share: Option<String>,
    /// A claim of this size instead, on a node that serves claims: memory=4Gi,cores=30
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["gpu", "share"])]
    pub claim: Option<Size>,
    /// The node; otherwise the first with room
    #[arg(long)]
    pub node: Option<String>,
    /// What it does
    #[arg(long, value_enum, default_value = "serve", conflicts_with = "command")]
    pub load: Load,
    /// Memory that the load takes, 4Gi for instance; otherwise a part of its quota
    #[arg(long, value_name = "Q", value_parser = memory, conflicts_with = "command")]
    pub memory: Option<u64>,
    /// A command of your own instead, which finds the simulated driver by its loader
    #[arg(last = true)]
    pub command: Vec<String>,
}

/// Names of what is no pod.
const RESERVED: [&str; 2] = ["plugin", "kubelet"];

/// A name as Kubernetes has it (RFC 1123), because metrics and files carry it.
fn name(text: &str) -> Result<String, String> {
    let is_good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_sound = !text.is_empty()
        && text.len() <= 63
        && text.chars().all(is_good)
        && !text.starts_with('-')
        && !text.ends_with('-');
    if !is_sound {
        return Err("a name has at most 63 lower-case letters, digits and `-`".into());
    }
    if RESERVED.contains(&text) {
        return Err(format!("`{text}` is what kill and restart call the node's own"));
    }
    Ok(text.to_owned())
}

/// Bytes; `4Gi`, `4GiB` and `512M` are good.
pub fn memory(text: &str) -> Result<u64, String> {
    let good = "write 512Mi or 4Gi";
    let plain = text.strip_suffix('B').unwrap_or(text);
    let bytes = tessera_model::quantity::parse_bytes(plain).map_err(|e| format!("{e}; {good}"))?;
    if bytes == 0 { Err(format!("0 is no memory; {good}")) } else { Ok(bytes) }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: u32 = text.parse().map_err(|_| "write whole seconds, 60 for instance")?;
    Ok(Duration::from_secs(seconds.into()))
}

/// What these words ask for.
pub fn parse(words: &[&str]) -> Result<Command, clap::Error> {
    Line::try_parse_from(words).map(|line| line.command)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Result<Command, clap::Error> {
        parse(&text.split(' ').collect::<Vec<_>>())
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, part) in [
            ("run", "NAME"),
            ("run A", "lower-case"),
            ("run plugin", "the node's own"),
            ("run ../x", "lower-case"),
            ("run a --gpu 0", "--gpu"),
            ("run a --memory 0", "0 is no memory"),
            ("run a --memory lots", "4Gi"),
            ("run a --load lots", "possible values"),
            ("run a --load idle -- true", "cannot be used"),
            ("xid 0 many", "many"),
        ] {
            let error = line(text).unwrap_err();
            let said = error.to_string();
            assert!(said.contains(part) && error.use_stderr(), "{text}: {said}");
        }
    }

    #[test]
    fn what_is_not_the_sandboxs_own_is_tesseras() {
        for text in ["quota set chat --memory 2Gi", "status -o json", "top", "explain a --node n1"]
        {
            let Ok(Command::Tessera(asked)) = line(text) else { panic!("{text}") };
            assert_eq!(asked.words().join(" "), text);
        }
        assert!(line("frobnicate").is_err() && line("serve").is_err());
    }
}
