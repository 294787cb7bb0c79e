//! People with kubeconfigs, and what `kubectl tessera` says to them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::process::{self, Output};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// A command asks a node for 5 s at most.
const LIMIT: Duration = Duration::from_secs(60);

/// `kubectl-tessera`, and the kubeconfigs of those that use it.
#[derive(Debug)]
pub struct Desk {
    dir: TempDir,
    /// The cluster's own kubeconfig, alone with its current context.
    whole: Value,
}

#[derive(Clone, Debug)]
pub struct Person {
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Desk {
    /// With the program as `make build` made it.
    pub fn new(suite: &Suite<'_>) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let program = suite.artefacts.join("tessera");
        for name in ["kubectl-tessera", "kubectl_complete-tessera"] {
            symlink(&program, dir.path().join(name))?;
        }
        let view = ["config", "view", "--raw", "--minify", "--flatten", "-o", "json"];
        let whole = serde_json::from_str(&suite.kubectl.run(&view)?).context("the kubeconfig")?;
        Ok(Self { dir, whole })
    }

    /// Whose kubeconfig the cluster's is.
    pub fn owner(&self, namespace: &str) -> Result<Person> {
        self.person("owner", namespace, self.whole["users"][0]["user"].clone())
    }

    /// A service account, with a token as a person has one.
    pub fn account(&self, suite: &Suite<'_>, namespace: &str, name: &str) -> Result<Person> {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token");
        let asked =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let made = suite.kubectl.feed(&["create", "--raw", &path, "-f", "-"], &asked)?;
        let made: Value = serde_json::from_str(&made)?;
        self.person(name, namespace, json!({"token": made["status"]["token"]}))
    }

    fn person(&self, name: &str, namespace: &str, credentials: Value) -> Result<Person> {
        let mut config = self.whole.clone();
        config["users"][0]["user"] = credentials;
        config["contexts"][0]["context"]["namespace"] = json!(namespace);
        let kubeconfig = self.dir.path().join(format!("{name}.kubeconfig"));
        fs::write(&kubeconfig, config.to_string())?;
        fs::set_permissions(&kubeconfig, fs::Permissions::from_mode(0o600))?;
        Ok(Person { program: self.dir.path().join("kubectl-tessera"), kubeconfig })
    }
}

impl Person {
    /// What `kubectl tessera` with these arguments says, whatever its exit status.
    pub fn tries(&self, args: &[&str]) -> Result<Output> {
        self.run("kubectl-tessera", args)
    }

    /// Standard output of `kubectl tessera`, which has to succeed.
    pub fn says(&self, args: &[&str]) -> Result<String> {
        self.tries(args)?.success(&format!("kubectl tessera {}", args.join(" ")))
    }

    /// Waits until `kubectl tessera` succeeds and says something of which `is_there` holds. Rights that were given a
    /// moment ago may not hold yet, and a node on a busy machine may not answer in time.
    pub fn says_at_last(
        &self,
        what: &str,
        args: &[&str],
        is_there: impl Fn(&str) -> bool,
    ) -> Result<String> {
        wait::until(what, wait::LIMIT, || {
            let said = self.tries(args)?;
            Ok(match said.code {
                Some(0) if is_there(&said.stdout) => Look::Done(said.stdout),
                _ => Look::NotYet(format!("{:?}: {}\n{}", said.code, said.stderr, said.stdout)),
            })
        })
    }

    pub fn json(&self, args: &[&str]) -> Result<Value> {
        let text = self.says(&[args, &["-o", "json"]].concat())?;
        serde_json::from_str(&text).with_context(|| text.clone())
    }

    /// What completion proposes for the last of these words.
    pub fn completes(&self, words: &[&str]) -> Result<Vec<String>> {
        let text = self.run("kubectl_complete-tessera", words)?.success("completion")?;
        Ok(text.lines().filter(|line| !line.starts_with(':')).map(str::to_owned).collect())
    }

    fn run(&self, name: &str, args: &[&str]) -> Result<Output> {
        let mut command = Command::new(self.program.with_file_name(name));
        process::run(command.env("KUBECONFIG", &self.kubeconfig).args(args), None, LIMIT)
    }
}
