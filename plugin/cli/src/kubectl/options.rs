//! Arguments that all commands have.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tessera_fleet::{Fleet, Options};

use super::failure::Failure;

/// Which cluster, which nodes, which namespace.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Common {
    /// The kubeconfig, as kubectl takes it [default: KUBECONFIG, ~/.kube/config, the pod's service account]
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig's context
    #[arg(long, global = true, value_name = "CONTEXT")]
    pub context: Option<String>,
    /// The namespace of pods [default: the context's]
    #[arg(long, short, global = true, value_name = "NAMESPACE", conflicts_with = "all_namespaces")]
    pub namespace: Option<String>,
    /// Pods of all namespaces
    #[arg(long, short = 'A', global = true)]
    pub all_namespaces: bool,
    /// Only this node; may be given several times
    #[arg(long, global = true, value_name = "NODE")]
    pub node: Vec<String>,
    /// The namespace of the plugin's pods
    #[arg(long, global = true, value_name = "NAMESPACE", default_value = "tessera")]
    pub plugin_namespace: String,
    /// Labels of the plugin's pods
    #[arg(
        long,
        global = true,
        value_name = "SELECTOR",
        hide = true,
        default_value = "app.kubernetes.io/name=tessera"
    )]
    pub plugin_selector: String,
    /// Port of the plugin's JSON API (api.listen), where its pods do not name it
    #[arg(long, global = true, value_name = "PORT")]
    pub plugin_port: Option<u16>,
}

/// How something is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people, at most 120 columns
    Text,
    /// For people, with full ids
    Wide,
    /// For programs: the types of /api/v1
    Json,
}

impl Common {
    pub fn options(&self) -> Options {
        Options {
            kubeconfig: self.kubeconfig.clone(),
            context: self.context.clone(),
            plugin_namespace: self.plugin_namespace.clone(),
            labels: self.plugin_selector.clone(),
            port: self.plugin_port,
            namespace: self.namespace.clone(),
            nodes: self.node.iter().cloned().collect(),
            ..Options::default()
        }
    }

    pub fn fleet(&self) -> Result<Fleet, Failure> {
        Ok(Fleet::new(self.options())?)
    }

    /// The namespace whose pods are asked about; empty for all.
    pub fn namespace(&self, fleet: &Fleet) -> String {
        match (&self.namespace, self.all_namespaces) {
            (_, true) => String::new(),
            (Some(namespace), false) => namespace.clone(),
            (None, false) => fleet.context().namespace.clone(),
        }
    }

    /// The node that is asked, where it is one.
    pub fn one_node(&self) -> Result<&str, Failure> {
        match self.node.as_slice() {
            [] => Ok(""),
            [node] => Ok(node),
            _ => Err(Failure::usage("this asks one node: give --node once")),
        }
    }
}
