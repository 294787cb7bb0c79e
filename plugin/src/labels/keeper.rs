//! Keeps the features file as the configuration in force wants it, from the first look to [`Keeper::remove`].

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing::{info, warn};

use super::{file, labels, lines};
use crate::admin::Sources;
use crate::config::{Config, Current};
use crate::device::{Facts, Gpu};
use crate::locks::lock;

/// How often it is looked at whether the file is there and still right: the configuration may have been
/// replaced, and node feature discovery's directory may have been cleared.
const LOOK: Duration = Duration::from_secs(5);

/// See the module's text.
#[derive(Debug)]
pub struct Keeper {
    gpus: Vec<Gpu>,
    facts: Facts,
    /// Where the file is that this plugin wrote.
    written: Mutex<Option<PathBuf>>,
}

impl Keeper {
    /// Of a node with these GPUs. Nothing is written yet.
    #[must_use]
    pub fn new(gpus: Vec<Gpu>, facts: Facts) -> Arc<Self> {
        Arc::new(Keeper { gpus, facts, written: Mutex::default() })
    }

    /// Looks now and then, for ever. What goes wrong is a condition of `status`.
    pub async fn run(self: &Arc<Self>, current: &Current, sources: &Sources) {
        let mut seen: Option<Arc<Config>> = None;
        loop {
            let config = current.get();
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
                if sources.set_condition("labels", problem.clone())
                    && let Some(text) = problem
                {
                    warn!("{text}");
                }
            }
            seen = Some(config);
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Makes the file what this configuration wants.
    ///
    /// # Errors
    /// What to do about a directory that can't be written to.
    pub fn refresh(&self, config: &Config) -> Result<(), String> {
        let wanted = config.labels.nfd_file.as_ref();
        let mut written = lock(&self.written);
        if let Some(old) = written.as_ref().filter(|old| Some(*old) != wanted) {
            file::remove(old)
                .map_err(|error| format!("cannot remove {}: {error}", old.display()))?;
            *written = None;
        }
        let Some(path) = wanted else { return Ok(()) };
        let labels = labels(&self.gpus, &self.facts, config);
        let new = file::put(path, &lines(&labels)).map_err(|error| {
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

    /// Removes the file that was written: a node without the plugin has no shares to choose.
    pub fn remove(&self) {
        let mut written = lock(&self.written);
        if let Some(path) = written.take()
            && let Err(error) = file::remove(&path)
        {
            warn!(file = %path.display(), %error, "node labels stay");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_follows_the_configuration_and_goes_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        let keeper = Keeper::new(vec![Gpu::example("GPU-a", 0)], Facts::default());
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
        keeper.refresh(&with(None, 4)).unwrap();
        assert!(!one.exists());
        keeper.refresh(&with(Some(&one), 4)).unwrap();
        assert_eq!(replicas(&one).as_deref(), Some("4"));
        // Another configuration, and somebody who removes it.
        keeper.refresh(&with(Some(&one), 7)).unwrap();
        assert_eq!(replicas(&one).as_deref(), Some("7"));
        std::fs::remove_file(&one).unwrap();
        keeper.refresh(&with(Some(&one), 7)).unwrap();
        assert!(one.exists());
        // Another place; then none.
        keeper.refresh(&with(Some(&two), 7)).unwrap();
        assert!(!one.exists() && two.exists());
        keeper.refresh(&with(None, 7)).unwrap();
        assert!(!two.exists());
        keeper.refresh(&with(Some(&two), 7)).unwrap();
        keeper.remove();
        assert!(!two.exists());
    }

    #[test]
    fn a_place_that_cannot_be_written_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let mut config = Config::default();
        config.labels.nfd_file = Some(dir.path().join("file/tessera"));
        let keeper = Keeper::new(vec![Gpu::example("GPU-a", 0)], Facts::default());
        let error = keeper.refresh(&config).unwrap_err();
        assert!(error.contains("labels.nfd_file") && error.contains("mount"), "{error}");
    }
}
