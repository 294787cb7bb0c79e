//! Which configuration holds on this node: that which a label of the node names.
//!
//! The files lie beside each other, as the keys of a ConfigMap do: `config.toml` for nodes without the label, `l4.toml`
//! for those labelled `<label>=l4`. A link in the state directory leads to the chosen one, and the plugin reads its
//! configuration through it. So a choice is checked, taken live, refused and kept as any other change of the file is.
//! The link outlives pod and reboot: while the API server does not answer, the last choice stands.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tessera_agent::status_board::StatusBoard;
use tessera_cluster::node::{Labels, NodeLabels};
use tessera_cluster::{Access, ApiError};
use tessera_config::ConfigFile;
use tokio::time::{Instant, sleep};
use tracing::info;

const LIMIT: Duration = Duration::from_secs(10);
const START: Duration = Duration::from_secs(15);
/// How long the API server is asked to keep a watch up.
const WATCH: Duration = Duration::from_secs(240);
/// How often it is looked whether the chosen file is there: a ConfigMap comes later than a label.
const LOOK: Duration = Duration::from_secs(10);
/// The pause after the API server failed, which doubles, at first and at most.
const PAUSE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
const LINK: &str = "node-config.toml";

#[derive(Debug)]
pub struct NodeConfig {
    label: String,
    /// The file of nodes without the label; the others lie beside it.
    default: PathBuf,
    link: PathBuf,
    labels: NodeLabels,
    /// Of the last answer; `None` before the first.
    seen: Option<Labels>,
}

impl NodeConfig {
    /// For the node that NODE_NAME names, by `label`; `default` is the file of nodes without it. The link will lie in
    /// `state`.
    pub fn of_environment(label: &str, default: &Path, state: &Path) -> anyhow::Result<Self> {
        let node = std::env::var("NODE_NAME").ok().filter(|name| !name.is_empty());
        let node = node.context("--config-label needs the node's name in NODE_NAME")?;
        let access = Access::of_environment();
        let access = access.context(
            "--config-label needs the API server: a service account's token, or KUBECONFIG",
        )?;
        let labels = NodeLabels::new(access, &node, LIMIT, WATCH);
        Ok(Self::new(label, default, state, labels))
    }

    fn new(label: &str, default: &Path, state: &Path, labels: NodeLabels) -> Self {
        let (label, default) = (label.to_owned(), default.to_owned());
        NodeConfig { label, default, link: state.join(LINK), labels, seen: None }
    }

    /// What the plugin reads its configuration through.
    pub fn file(&self) -> ConfigFile {
        ConfigFile { asked: Some(self.link.clone()) }
    }

    /// Makes the first choice. If the API server does not answer, the last choice stands; the sentence says so. There
    /// is no log yet.
    pub async fn first(&mut self) -> anyhow::Result<Option<String>> {
        self.first_within(START).await
    }

    async fn first_within(&mut self, patience: Duration) -> anyhow::Result<Option<String>> {
        let end = Instant::now() + patience;
        let failure = loop {
            match self.labels.get().await {
                Ok(labels) => {
                    self.seen = Some(labels);
                    break None;
                }
                Err(error) if Instant::now() + PAUSE[0] >= end => break Some(error.to_string()),
                Err(_) => sleep(PAUSE[0]).await,
            }
        };
        let Some(failure) = failure else {
            return self.take();
        };
        if self.link.symlink_metadata().is_err() {
            self.point(&self.default)?;
        }
        let said = unread(&failure, &self.link);
        Ok(Some(said))
    }

    pub async fn follow(mut self, board: Arc<StatusBoard>) {
        let mut pause = PAUSE[0];
        if self.seen.is_some() {
            self.settle(&board, None);
        }
        loop {
            match self.hear(&board).await {
                Ok(labels) => {
                    self.seen = Some(labels);
                    self.settle(&board, None);
                    pause = PAUSE[0];
                }
                Err(error) => {
                    self.settle(&board, Some(unread(&error.to_string(), &self.link)));
                    pause = (pause * 2).min(PAUSE[1]);
                }
            }
            // Also bounds the requests for a node that changes all the time.
            sleep(pause).await;
        }
    }

    async fn hear(&self, board: &StatusBoard) -> Result<Labels, ApiError> {
        if let Some(seen) = &self.seen {
            let mut changed = std::pin::pin!(self.labels.changed(seen));
            loop {
                tokio::select! {
                    heard = &mut changed => break heard?,
                    () = sleep(LOOK) => self.settle(board, None),
                }
            }
        }
        self.labels.get().await
    }

    /// Takes what the label names, and has `status` say what is amiss.
    fn settle(&self, board: &StatusBoard, failed: Option<String>) {
        let taken = || self.take().unwrap_or_else(|error| Some(format!("{error:#}")));
        board.set_condition("node-config", failed.or_else(taken));
    }

    /// Has the link lead to the file that the label names; why it is another.
    fn take(&self) -> anyhow::Result<Option<String>> {
        let value = self.seen.as_ref().and_then(|seen| seen.labels.get(&self.label));
        let (file, amiss) = choose(&self.label, &self.default, value.map(String::as_str));
        self.point(&file)?;
        Ok(amiss)
    }

    fn point(&self, file: &Path) -> anyhow::Result<()> {
        let point = || -> io::Result<bool> {
            if std::fs::read_link(&self.link).is_ok_and(|to| to == file) {
                return Ok(false);
            }
            let new = self.link.with_extension("new");
            match std::fs::remove_file(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            std::os::unix::fs::symlink(file, &new)?;
            std::fs::rename(&new, &self.link)?;
            Ok(true)
        };
        let is_new = point().with_context(|| format!("the link {}", self.link.display()))?;
        if is_new {
            info!(file = %file.display(), label = self.label, "this configuration is chosen");
        }
        Ok(())
    }
}

fn unread(why: &str, link: &Path) -> String {
    let file = std::fs::read_link(link).unwrap_or_else(|_| link.to_owned());
    format!("the node's labels cannot be read, so {} is kept: {why}", file.display())
}

/// The file, and why it is not the one that the label names.
fn choose(label: &str, default: &Path, value: Option<&str>) -> (PathBuf, Option<String>) {
    let Some(name) = value else { return (default.to_owned(), None) };
    let dir = default.parent().unwrap_or(Path::new("."));
    let is_name = !name.starts_with('.')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
    let file = dir.join(format!("{name}.toml"));
    if is_name && !name.is_empty() && file.is_file() {
        return (file, None);
    }
    let there = names(dir, default);
    let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    let amiss = format!(
        "the node's label {label}={name:?} names no configuration (there are: {there}); {} holds",
        default.display()
    );
    (default.to_owned(), Some(amiss))
}

fn names(dir: &Path, default: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.path())
        .filter(|path| path != default && path.extension().is_some_and(|found| found == "toml"))
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_cluster::fixtures::{ApiServer, Temper};
    use tokio::time::timeout;

    const LABEL: &str = "tessera.dev/config";

    struct World {
        dir: tempfile::TempDir,
        server: ApiServer,
    }

    impl World {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            for name in ["config", "l4", "a100"] {
                std::fs::write(dir.path().join(format!("{name}.toml")), "").unwrap();
            }
            let server = ApiServer::start(dir.path());
            World { dir, server }
        }

        fn config(&self) -> NodeConfig {
            let labels = NodeLabels::new(self.server.access(), "n1", LIMIT, WATCH);
            NodeConfig::new(LABEL, &self.dir.path().join("config.toml"), self.dir.path(), labels)
        }

        fn label(&self, value: Option<&str>) {
            self.server.with(|store| store.label("n1", LABEL, value));
        }

        fn chosen(&self) -> String {
            let file = std::fs::read_link(self.dir.path().join(LINK)).unwrap();
            file.file_stem().unwrap().to_str().unwrap().to_owned()
        }

        async fn until_chosen(&self, name: &str) {
            let wait = async {
                while self.chosen() != name {
                    sleep(Duration::from_millis(5)).await;
                }
            };
            timeout(Duration::from_secs(60), wait).await.expect(name);
        }
    }

    #[tokio::test]
    async fn a_label_chooses_at_the_start_and_a_change_of_it_while_the_plugin_runs() {
        let world = World::new();
        world.label(Some("l4"));
        let mut config = world.config();
        assert_eq!(config.first().await.unwrap(), None);
        assert_eq!(world.chosen(), "l4");
        let board = Arc::new(StatusBoard::default());
        let following = tokio::spawn(config.follow(Arc::clone(&board)));
        world.label(Some("a100"));
        world.until_chosen("a100").await;
        world.label(None);
        world.until_chosen("config").await;
        world.label(Some("h100"));
        let amiss = async {
            while board.conditions().is_empty() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(60), amiss).await.unwrap();
        let said = board.conditions().join("\n");
        assert!(said.contains("\"h100\"") && said.contains("a100, l4"), "{said}");
        assert_eq!(world.chosen(), "config");
        following.abort();
    }

    #[tokio::test]
    async fn without_the_api_server_the_last_choice_stands() {
        let world = World::new();
        world.server.set_temper(Temper::Answers(503, "away".into()));
        let said = world.config().first_within(Duration::ZERO).await.unwrap().unwrap();
        assert!(said.contains("config.toml is kept") && said.contains("away"), "{said}");
        assert_eq!(world.chosen(), "config");
        world.server.set_temper(Temper::Works);
        world.label(Some("l4"));
        assert_eq!(world.config().first().await.unwrap(), None);
        world.server.set_temper(Temper::Answers(503, "away".into()));
        let said = world.config().first_within(Duration::ZERO).await.unwrap().unwrap();
        assert!(said.contains("l4.toml is kept"), "{said}");
        assert_eq!(world.chosen(), "l4");
    }

    #[test]
    fn a_value_names_a_file_of_the_directory_or_nothing() {
        let world = World::new();
        let default = world.dir.path().join("config.toml");
        std::fs::write(world.dir.path().join("token.txt"), "").unwrap();
        let chosen = |value: &str| choose(LABEL, &default, Some(value));
        assert_eq!(chosen("l4"), (world.dir.path().join("l4.toml"), None));
        for hostile in ["", "..", "../l4", "/etc/passwd", ".l4", "l4\n", "token", "L4"] {
            let (file, amiss) = chosen(hostile);
            assert!(file == default && amiss.is_some(), "{hostile:?}: {file:?}");
        }
        assert_eq!(choose(LABEL, &default, None), (default.clone(), None));
    }
}
