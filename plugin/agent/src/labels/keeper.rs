//! Keeps the features file for node feature discovery as the configuration in force wants it, from the first look to
//! [`Keeper::remove`]: whole at any time, by rename. Its worker reads every file of the directory but those whose names begin
//! with a dot.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing::{info, warn};

use super::{PREFIX, labels, lines};
use crate::Agent;
use tessera_config::Config;
use tessera_gpu::{Discovery, Facts};
use tessera_model::gpu::Gpu;
use tessera_system::files::{self, Dir};
use tessera_system::locks::lock;

/// How often it is looked at whether the file is there and still right: the configuration may have been
/// replaced, and node feature discovery's directory may have been cleared.
const LOOK: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
struct State {
    /// Where the file is that this plugin wrote.
    written: Option<PathBuf>,
    /// Of which GPUs the driver was asked last, and what it said.
    asked: Option<(Vec<Gpu>, Facts)>,
}

pub struct Keeper {
    agent: Arc<Agent>,
    discovery: Arc<dyn Discovery>,
    state: Mutex<State>,
}

impl Keeper {
    pub fn new(agent: Arc<Agent>, discovery: Arc<dyn Discovery>) -> Arc<Self> {
        Arc::new(Keeper { agent, discovery, state: Mutex::default() })
    }

    /// Looks now and then, for ever. What goes wrong is a condition of `status`.
    pub async fn run(self: &Arc<Self>) {
        let mut seen: Option<Arc<Config>> = None;
        loop {
            let config = self.agent.config();
            // Off, and off before: nothing to look at.
            let idle = config.labels.nfd_file.is_none()
                && seen.as_ref().is_some_and(|seen| seen.labels.nfd_file.is_none());
            if !idle {
                let (keeper, config) = (Arc::clone(self), Arc::clone(&config));
                let outcome = tokio::task::spawn_blocking(move || keeper.refresh(&config)).await;
                let problem = match outcome {
                    Ok(outcome) => outcome.err(),
                    Err(error) => Some(error.to_string()),
                };
                self.agent.board().set_condition("labels", problem);
            }
            seen = Some(config);
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Makes the file what this configuration wants, of the GPUs that are included now. Blocking: asks the driver.
    pub fn refresh(&self, config: &Config) -> Result<(), String> {
        let gpus = self.agent.inventory().catalogue().devices();
        lock(&self.state).refresh(config, gpus, |gpus| self.discovery.facts(gpus))
    }

    /// Removes the file that was written: a node without the plugin has no shares to choose.
    pub fn remove(&self) {
        lock(&self.state).remove();
    }
}

impl State {
    fn refresh(
        &mut self,
        config: &Config,
        gpus: Vec<Gpu>,
        ask: impl Fn(&[Gpu]) -> Facts,
    ) -> Result<(), String> {
        let wanted = config.labels.nfd_file.as_ref();
        let State { written, asked } = self;
        if let Some(old) = written.as_ref().filter(|old| Some(*old) != wanted) {
            remove(old).map_err(|error| format!("cannot remove {}: {error}", old.display()))?;
            *written = None;
        }
        let Some(path) = wanted else { return Ok(()) };
        if asked.as_ref().is_none_or(|(known, _)| *known != gpus) {
            let facts = ask(&gpus);
            *asked = Some((gpus, facts));
        }
        let Some((gpus, facts)) = asked else { return Ok(()) };
        let labels = labels(gpus, facts, config);
        let new = put(path, &lines(&labels)).map_err(|error| {
            format!(
                "no node labels: cannot write labels.nfd_file {}: {error}; mount node feature discovery's \
                 directory writable into the plugin, or leave the key empty",
                path.display()
            )
        })?;
        if new {
            info!(file = %path.display(), labels = labels.len(), "node labels for node feature discovery");
        }
        *written = Some(path.clone());
        Ok(())
    }

    fn remove(&mut self) {
        if let Some(path) = self.written.take()
            && let Err(error) = remove(&path)
        {
            warn!(file = %path.display(), %error, "node labels stay");
        }
    }
}

/// Makes `text` the content of `path`, unless it is already; whether it was not.
///
/// Errors: The file system's; a file that holds something else than labels of ours. What was there before is still
/// there then.
fn put(path: &Path, text: &str) -> io::Result<bool> {
    let plain = path.symlink_metadata().is_ok_and(|meta| meta.is_file());
    if plain {
        let found = files::read(path, files::SMALL)?;
        if found == text.as_bytes() {
            return Ok(false);
        }
        if !is_ours(&found) {
            return Err(not_ours());
        }
    }
    let (dir, name) = Dir::of(path)?;
    // Not durable: after a power cut it is written again.
    dir.replace(name, text.as_bytes(), 0o644, false)?;
    Ok(true)
}

fn remove(path: &Path) -> io::Result<()> {
    let removed = match files::read(path, files::SMALL) {
        Ok(found) if !is_ours(&found) => return Err(not_ours()),
        Ok(_) => Dir::holding(path).and_then(|(dir, name)| dir.remove(name)),
        Err(error) => Err(error.into()),
    };
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether all of it is labels as this plugin writes them.
fn is_ours(found: &[u8]) -> bool {
    let prefix = PREFIX.as_bytes();
    found.split(|byte| *byte == b'\n').all(|line| line.is_empty() || line.starts_with(prefix))
}

fn not_ours() -> io::Error {
    io::Error::new(
        ErrorKind::AlreadyExists,
        "it holds something else than Tessera's labels and is left alone: name another file",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of GPUs of compute capability 9.0.
    fn refresh(state: &mut State, config: &Config, gpus: &[&str]) -> Result<(), String> {
        let gpus = gpus.iter().zip(0..).map(|(uuid, index)| Gpu::example(uuid, index));
        let capability = |gpu: &Gpu| (gpu.uuid.clone(), (9, 0));
        state.refresh(config, gpus.collect(), |gpus| Facts {
            compute_capability: gpus.iter().map(capability).collect(),
            ..Facts::default()
        })
    }

    #[test]
    fn the_labels_follow_the_gpus_that_are_included() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        let path = dir.path().join("tessera");
        config.labels.nfd_file = Some(path.clone());
        let mut state = State::default();
        let label = |name: &str| {
            let text = std::fs::read_to_string(&path).unwrap();
            let key = format!("tessera.dev/gpu.{name}=");
            text.lines().find_map(|line| Some(line.strip_prefix(&key)?.to_owned()))
        };
        refresh(&mut state, &config, &["GPU-a"]).unwrap();
        assert_eq!(label("count").as_deref(), Some("1"));
        // One more, of which the driver was not asked before.
        refresh(&mut state, &config, &["GPU-a", "GPU-b"]).unwrap();
        assert_eq!(label("count").as_deref(), Some("2"));
        assert_eq!(label("compute.major").as_deref(), Some("9"), "of both");
        refresh(&mut state, &config, &["GPU-b"]).unwrap();
        assert_eq!(label("count").as_deref(), Some("1"));
    }

    #[test]
    fn the_file_follows_the_configuration_and_goes_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        let mut state = State::default();
        let with = |path: Option<&PathBuf>, replicas: u32| {
            let mut config = Config::default();
            config.labels.nfd_file = path.cloned();
            config.share.replicas = replicas;
            config
        };
        let replicas = |path: &PathBuf| {
            let text = std::fs::read_to_string(path).unwrap();
            text.lines()
                .find_map(|line| Some(line.strip_prefix("tessera.dev/gpu.replicas=")?.to_owned()))
        };
        refresh(&mut state, &with(None, 4), &["GPU-a"]).unwrap();
        assert!(!one.exists());
        refresh(&mut state, &with(Some(&one), 4), &["GPU-a"]).unwrap();
        assert_eq!(replicas(&one).as_deref(), Some("4"));
        // Another configuration, and somebody who removes it.
        refresh(&mut state, &with(Some(&one), 7), &["GPU-a"]).unwrap();
        assert_eq!(replicas(&one).as_deref(), Some("7"));
        std::fs::remove_file(&one).unwrap();
        refresh(&mut state, &with(Some(&one), 7), &["GPU-a"]).unwrap();
        assert!(one.exists());
        // Another place; then none.
        refresh(&mut state, &with(Some(&two), 7), &["GPU-a"]).unwrap();
        assert!(!one.exists() && two.exists());
        refresh(&mut state, &with(None, 7), &["GPU-a"]).unwrap();
        assert!(!two.exists());
        refresh(&mut state, &with(Some(&two), 7), &["GPU-a"]).unwrap();
        state.remove();
        assert!(!two.exists());
    }

    #[test]
    fn a_place_that_cannot_be_written_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let mut config = Config::default();
        config.labels.nfd_file = Some(dir.path().join("file/tessera"));
        let error = refresh(&mut State::default(), &config, &["GPU-a"]).unwrap_err();
        assert!(error.contains("labels.nfd_file") && error.contains("mount"), "{error}");
    }

    #[test]
    fn it_is_replaced_as_a_whole_and_only_when_it_differs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("features.d/tessera");
        assert!(put(&path, "tessera.dev/gpu.a=1\n").unwrap());
        let before = std::fs::File::open(&path).unwrap();
        assert!(!put(&path, "tessera.dev/gpu.a=1\n").unwrap());
        assert!(put(&path, "tessera.dev/gpu.a=2\ntessera.dev/gpu.b=3\n").unwrap());
        // A reader of the old one reads all of it.
        assert_eq!(io::read_to_string(before).unwrap(), "tessera.dev/gpu.a=1\n");
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "tessera.dev/gpu.a=2\ntessera.dev/gpu.b=3\n"
        );
        let names: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        remove(&path).unwrap();
        remove(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn links_are_overwritten_and_not_followed_and_what_is_anothers_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("tessera"), dir.path().join("other"));
        std::fs::write(&other, "precious").unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert!(put(&path, "tessera.dev/gpu.a=1\n").unwrap());
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
        assert!(path.symlink_metadata().unwrap().is_file());
        for at in [put(&other, "tessera.dev/gpu.a=1\n").map(drop), remove(&other)] {
            assert_eq!(at.unwrap_err().kind(), ErrorKind::AlreadyExists);
        }
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
    }
}
