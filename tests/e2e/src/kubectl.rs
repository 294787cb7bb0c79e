//! kubectl, the one client that every cluster has.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::process::{self, Output};
use crate::wait::{self, Look};

/// No single request takes longer on a healthy cluster.
const REQUEST: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Kubectl {
    pub fn new(program: PathBuf, kubeconfig: PathBuf) -> Self {
        Self { program, kubeconfig }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.env("KUBECONFIG", &self.kubeconfig).args(args);
        command
    }

    /// The output of a command, whatever its exit status.
    pub fn try_run(&self, args: &[&str], stdin: Option<&str>) -> Result<Output> {
        process::run(&mut self.command(args), stdin, REQUEST)
    }

    /// Standard output of a command that has to succeed.
    pub fn run(&self, args: &[&str]) -> Result<String> {
        self.try_run(args, None)?.success(&format!("kubectl {}", args.join(" ")))
    }

    /// Whether the API server has this version of a group: what it says about its own version may be
    /// empty.
    pub fn has_api(&self, version: &str) -> Result<bool> {
        Ok(self.run(&["api-versions"])?.lines().any(|line| line == version))
    }

    /// Every kind that the API server has, as version and name.
    pub fn kinds(&self) -> Result<BTreeSet<(String, String)>> {
        let resources = self.run(&["api-resources", "--no-headers"])?;
        let kind = |line: &str| {
            // Short names may be missing: read from the end.
            let mut words = line.split_whitespace().rev();
            let (kind, _, version) = (words.next()?, words.next()?, words.next()?);
            Some((version.to_owned(), kind.to_owned()))
        };
        Ok(resources.lines().filter_map(kind).collect())
    }

    /// An object, or several as a `List`.
    pub fn get(&self, args: &[&str]) -> Result<Value> {
        let text = self.run(&[&["get", "-o", "json"], args].concat())?;
        serde_json::from_str(&text).context("kubectl get -o json")
    }

    pub fn items(&self, args: &[&str]) -> Result<Vec<Value>> {
        match self.get(args)?["items"].take() {
            Value::Array(items) => Ok(items),
            other => bail!("no list: {other}"),
        }
    }

    pub fn feed(&self, args: &[&str], object: &Value) -> Result<String> {
        let output = self.try_run(args, Some(&object.to_string()))?;
        output.success(&format!("kubectl {}", args.join(" ")))
    }

    /// The output of a command in a container, whatever its exit status.
    pub fn try_exec(&self, place: [&str; 3], command: &[&str]) -> Result<Output> {
        let [namespace, pod, container] = place;
        let head = ["exec", "-n", namespace, pod, "-c", container, "--"];
        self.try_run(&[&head[..], command].concat(), None)
    }

    /// An object, or `None` where it does not exist.
    pub fn find(&self, args: &[&str]) -> Result<Option<Value>> {
        let text = self.run(&[&["get", "-o", "json", "--ignore-not-found"], args].concat())?;
        if text.trim().is_empty() {
            return Ok(None);
        }
        serde_json::from_str(&text).map(Some).context("kubectl get -o json")
    }

    /// Deletes every pod of a namespace and waits until no container of them runs.
    pub fn delete_pods(&self, namespace: &str) -> Result<()> {
        self.run(&["delete", "pods", "--all", "-n", namespace, "--wait=false"])?;
        wait::until("no container runs", wait::LIMIT, || {
            // A busy API server may let a question time out.
            let pods = match self.items(&["pods", "-n", namespace]) {
                Ok(pods) => pods,
                Err(error) => return Ok(Look::NotYet(format!("{error:#}"))),
            };
            let statuses =
                pods.iter().flat_map(|pod| pod["status"]["containerStatuses"].as_array());
            let containers = statuses.flatten();
            let running = containers.filter(|c| c["state"]["running"].is_object()).count();
            Ok(Look::when(running == 0, format!("{running} containers run")))
        })?;
        // Kubelets before 1.22 take up to a minute more until their garbage collection has removed
        // the last ended container. Nothing depends on it.
        self.forget_pods(namespace)
    }

    pub fn apply(&self, object: &Value) -> Result<()> {
        self.feed(&["apply", "-f", "-"], object).map(drop)
    }

    /// Creates a pod, without asking first what a pod is: a third of the processor time.
    pub fn create_pod(&self, pod: &Value) -> Result<()> {
        let namespace = pod["metadata"]["namespace"].as_str().unwrap_or("default");
        let path = format!("/api/v1/namespaces/{namespace}/pods");
        self.feed(&["create", "--raw", &path, "-f", "-"], pod).map(drop)
    }

    /// Removes every pod of a namespace from the API at once; kubelet ends what runs.
    pub fn forget_pods(&self, namespace: &str) -> Result<()> {
        let all = ["delete", "pods", "--all", "-n", namespace, "--wait=false"];
        self.run(&[&all[..], &["--force", "--grace-period=0"]].concat()).map(drop)
    }

    /// Creates several objects by one request of the command line.
    pub fn create_all(&self, objects: Vec<Value>) -> Result<()> {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        self.feed(&["create", "-f", "-"], &list).map(drop)
    }

    pub fn delete(&self, object: &Value) -> Result<()> {
        let delete = ["delete", "-f", "-", "--ignore-not-found", "--timeout=50s"];
        self.feed(&delete, object).map(drop)
    }

    /// The objects of a YAML file, as kubectl itself reads it.
    pub fn read_manifest(&self, file: &Path) -> Result<Vec<Value>> {
        let file = file.display().to_string();
        let text = self.run(&["create", "--dry-run=client", "-o", "json", "-f", &file])?;
        let mut objects = Vec::new();
        for object in serde_json::Deserializer::from_str(&text).into_iter::<Value>() {
            let object = object.context("kubectl create --dry-run -o json")?;
            match object.get("items").and_then(Value::as_array) {
                Some(items) => objects.extend(items.iter().cloned()),
                None => objects.push(object),
            }
        }
        Ok(objects)
    }
}

/// An object on the cluster, deleted when this goes.
#[derive(Debug)]
pub struct Applied<'a> {
    kubectl: &'a Kubectl,
    object: Value,
}

impl<'a> Applied<'a> {
    pub fn new(kubectl: &'a Kubectl, object: Value) -> Result<Self> {
        kubectl.apply(&object)?;
        Ok(Self { kubectl, object })
    }

    pub fn namespace(kubectl: &'a Kubectl, name: &str, label: (&str, &str)) -> Result<Self> {
        let mut namespace = namespace(name);
        namespace["metadata"]["labels"][label.0] = json!(label.1);
        Self::new(kubectl, namespace)
    }
}

/// A namespace that these tests may remove.
pub fn namespace(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {"tessera.dev/e2e": "true"}},
    })
}

impl Drop for Applied<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.kubectl.delete(&self.object) {
            println!("     {} stays: {error:#}", self.object["metadata"]["name"]);
        }
    }
}
