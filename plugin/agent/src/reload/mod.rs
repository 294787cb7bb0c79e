//! Reading the configuration again while the plugin runs.
//!
//! A bad file is refused as a whole and said so: in the log, in `status`, in the history. What is good takes
//! effect in one step ([`Agent::reload`]); keys that take a restart keep the values they had, which is
//! said too. [`tessera_config::keys`] knows which they are. The last good text is kept beside the ledger,
//! for a start that finds a bad one ([`tessera_config::file`]).
//!
//! GPUs that are not sold although the configuration includes them are named, and those that do not answer are asked again.
//!
//! It is read again at SIGHUP, and when the file is another, wherever links lead to it: a ConfigMap's update renames the
//! link `..data` beside it, and editors rename a new file over the old one.

pub mod plan;

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use tessera_config::keys::{Difference, Takes};
use tessera_config::{
    Config, ConfigError, ConfigFile, Current, Gpus, Judged, LoadedConfig, Problem, file, keys,
};
use tessera_gpu::{Discovery, DiscoveryError, selected};
use tessera_model::audit::{Actor, What};
use tessera_model::clock::unix_ms;
use tessera_model::counted;
use tessera_model::gpu::Gpu;
use tessera_model::printable;
use tessera_rules::capacity;
use tessera_system::files;
use tessera_system::locks::lock;
use tessera_view::API_VERSION;
use tessera_view::change::ReloadResponse;
use tessera_view::status::Configuration;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

use crate::Agent;
use crate::inventory::GpuSelection;
use crate::status_board::StatusBoard;

/// Most differences that are logged and kept, and most bytes of each.
const MOST_DIFFERENCES: usize = 50;
const LONGEST_DIFFERENCE: usize = 600;

pub type SetFilter = Box<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReloadCause {
    /// The file may have changed. An unchanged text is ignored.
    Change,
    Signal,
    Asked(Option<Actor>),
}

impl ReloadCause {
    fn by(&self) -> Option<Actor> {
        match self {
            ReloadCause::Asked(by) => by.clone(),
            ReloadCause::Change | ReloadCause::Signal => None,
        }
    }
}

impl fmt::Display for ReloadCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReloadCause::Change => "the file changed",
            ReloadCause::Signal => "SIGHUP",
            ReloadCause::Asked(_) => "tessera config reload",
        })
    }
}

pub struct Reloader {
    file: Option<ConfigFile>,
    current: Current,
    discovery: Arc<dyn Discovery>,
    set_filter: Option<SetFilter>,
    agent: OnceLock<Arc<Agent>>,
    board: Arc<StatusBoard>,
    /// What was read last; the reader holds the lock.
    seen: Mutex<String>,
    state: Mutex<Configuration>,
    taken: AtomicU64,
    /// The text at the start, until it has proved good.
    first: Mutex<Option<String>>,
}

impl Reloader {
    pub fn new(
        file: Option<ConfigFile>,
        given: &LoadedConfig,
        current: Current,
        discovery: Arc<dyn Discovery>,
        set_filter: Option<SetFilter>,
        board: &Arc<StatusBoard>,
    ) -> Self {
        let now = unix_ms();
        let state = Configuration {
            hash: file::hash(&given.text),
            attempted_unix_ms: now,
            succeeded_unix_ms: now,
            ..Configuration::default()
        };
        let seen = match (&given.refused, &file) {
            (Some(_), Some(file)) => mark(&file.judge()),
            _ => file::hash(&given.text),
        };
        let reloader = Reloader {
            file,
            current,
            discovery,
            set_filter,
            agent: OnceLock::new(),
            board: Arc::clone(board),
            seen: Mutex::new(seen),
            state: Mutex::new(state),
            taken: AtomicU64::new(0),
            first: Mutex::new(given.refused.is_none().then(|| given.text.clone())),
        };
        if let Some(refused) = &given.refused {
            reloader.refuse(&refused.problems);
        }
        reloader
    }

    pub fn file(&self) -> Option<&ConfigFile> {
        self.file.as_ref()
    }

    pub fn current(&self) -> &Current {
        &self.current
    }

    pub fn state(&self) -> Configuration {
        lock(&self.state).clone()
    }

    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// The configuration to start with on these GPUs: that in force, or where it is impossible on them
    /// the last good one.
    pub fn begin(&self, gpus: &[Gpu]) -> Result<Arc<Config>, ConfigError> {
        let config = self.current.get();
        let problems = capacity::check(gpus, &config);
        if problems.is_empty() {
            return Ok(config);
        }
        let good = file::last_good(&config.paths.ledger);
        let good = good.filter(|(good, _)| capacity::check(gpus, good).is_empty());
        let Some((mut good, text)) = good else {
            return Err(ConfigError { file: config.source.file.clone(), problems });
        };
        keys::keep(&mut good, &config);
        self.current.set(Arc::new(good));
        *lock(&self.first) = None;
        lock(&self.state).hash = file::hash(&text);
        self.refuse(&problems);
        Ok(self.current.get())
    }

    /// Makes the node, which a file that is read from now on changes. Blocking.
    pub fn attach<E>(
        &self,
        open: impl FnOnce(Current) -> Result<Arc<Agent>, E>,
    ) -> Result<Arc<Agent>, E> {
        // Nobody reads meanwhile.
        let seen = lock(&self.seen);
        let agent = open(self.current.clone())?;
        // Set once by the start.
        let _ = self.agent.set(Arc::clone(&agent));
        drop(seen);
        if let Some(text) = lock(&self.first).take() {
            self.keep(&text);
        }
        let problems = self.state().errors;
        if !problems.is_empty() {
            let what = What::ConfigurationRefused { problems };
            agent.note_configuration(what, "the start".to_owned(), None);
        }
        Ok(agent)
    }

    /// The GPUs that a configuration includes: those there are where it names the same.
    pub fn select_gpus(&self, config: &Config) -> Result<Option<GpuSelection>, String> {
        let (now, wanted) = (&self.current.get().gpus, &config.gpus);
        if (&now.include, &now.exclude) == (&wanted.include, &wanted.exclude) {
            return Ok(None);
        }
        self.look(wanted).map(Some)
    }

    /// Reads the file, and has it take effect if it is good. Blocking.
    pub fn reload(&self, why: &ReloadCause) -> ReloadResponse {
        let mut response = ReloadResponse::default();
        let Some(file) = &self.file else { return response };
        let mut seen = lock(&self.seen);
        let judged = file.judge();
        let mark = mark(&judged);
        if *why != ReloadCause::Change || *seen != mark {
            *seen = mark;
            self.take(file, judged, why, &mut response);
        }
        drop(seen);
        response.api_version = API_VERSION.to_owned();
        response.file = file.path().display().to_string();
        response.configuration = self.state();
        response
    }

    fn take(
        &self,
        file: &ConfigFile,
        judged: Judged,
        why: &ReloadCause,
        response: &mut ReloadResponse,
    ) {
        let path = file.path().display();
        lock(&self.state).attempted_unix_ms = unix_ms();
        let before = self.current.get();
        let Judged { mut config, text, mut problems } = judged;
        let mut selection = None;
        if problems.is_empty() {
            match self.select_gpus(&config) {
                Ok(found) => {
                    selection = found;
                    problems = self.impossible(&config, selection.as_ref());
                }
                Err(why) => problems.push(config.source.problem(
                    "gpus.include",
                    format!("takes effect only if the driver says what GPUs there are: {why}"),
                )),
            }
        }
        if !problems.is_empty() {
            error!(%path, %why, "the configuration is refused; the last good one stays in force");
            self.refuse(&problems);
            if let Some(agent) = self.agent.get() {
                let what = What::ConfigurationRefused { problems: self.state().errors };
                agent.note_configuration(what, why.to_string(), why.by());
            }
            response.problems = plan::problems(&problems);
            return;
        }
        let (mut changes, mut waiting) = (Vec::new(), Vec::new());
        for difference in keys::differences(&before, &config) {
            match difference.takes {
                Takes::Restart => waiting.push(difference),
                Takes::AtOnce | Takes::NewPods => changes.push(difference),
            }
        }
        keys::keep(&mut config, &before);
        if config.log.filter != before.log.filter
            && let Some(set) = &self.set_filter
            && let Err(error) = set(&config.log.filter)
        {
            warn!(error, "the log's filter stays as it was");
        }
        let listed = selection.is_some();
        match self.agent.get() {
            _ if changes.is_empty() => {}
            Some(agent) => agent.reload(config, selection),
            None => self.current.set(Arc::new(config)),
        }
        if listed {
            self.say_unsold();
        }
        self.keep(&text);
        self.accept(&text, &changes, &waiting);
        self.taken.fetch_add(1, Ordering::Relaxed);
        info!(
            %path, %why, changes = ?texts(&changes), after_a_restart = ?texts(&waiting),
            "the configuration was read"
        );
        if let Some(agent) = self.agent.get().filter(|_| !changes.is_empty() || !waiting.is_empty())
        {
            let what = What::ConfigurationReloaded { changes: described(&changes, &waiting) };
            agent.note_configuration(what, why.to_string(), why.by());
        }
        response.changes = plan::changes(&changes);
        response.waiting = plan::changes(&waiting);
    }

    /// What is impossible on the GPUs of the node, if there is one; if nothing is, says what is odd.
    fn impossible(&self, config: &Config, selection: Option<&GpuSelection>) -> Vec<Problem> {
        let Some(agent) = self.agent.get() else { return Vec::new() };
        let known = || agent.inventory.catalogue().devices();
        let gpus = selection.map_or_else(known, |selection| selection.gpus.clone());
        let problems = capacity::check(&gpus, config);
        if problems.is_empty() {
            self.remark(&gpus, config);
        }
        problems
    }

    /// What is odd, and no error.
    pub fn remark(&self, gpus: &[Gpu], config: &Config) {
        let remarks = plan::remarks(gpus, config);
        let text = (!remarks.is_empty()).then(|| remarks.join("; "));
        self.board.set_condition("configuration", text);
    }

    fn keep(&self, text: &str) {
        if self.file.is_none() {
            return;
        }
        if let Err(error) = file::keep_last_good(&self.current.get().paths.ledger, text) {
            warn!(%error, "the configuration is not kept for a start that finds a bad one");
        }
    }

    fn refuse(&self, problems: &[Problem]) {
        let error = ConfigError {
            file: self.file.as_ref().map(|file| file.path().to_owned()),
            problems: problems.to_vec(),
        };
        let errors: Vec<String> = error.to_string().lines().map(str::to_owned).collect();
        let text = format!(
            "the configuration file is bad, and the last good configuration stays in force: {}",
            errors.join("; ")
        );
        self.board.set_condition("configuration-file", Some(text));
        let mut state = lock(&self.state);
        state.errors = errors;
        state.refused += 1;
    }

    fn accept(&self, text: &str, changes: &[Difference], waiting: &[Difference]) {
        self.board.set_condition("configuration-file", None);
        let sentence = format!(
            "the configuration file has values that take a restart of the plugin: {}",
            texts(waiting).join("; ")
        );
        let sentence = (!waiting.is_empty()).then_some(sentence);
        self.board.set_condition("configuration-restart", sentence);
        let mut state = lock(&self.state);
        state.errors.clear();
        state.waiting_keys = waiting.iter().map(|difference| difference.key.clone()).collect();
        state.hash = file::hash(text);
        state.succeeded_unix_ms = unix_ms();
        state.applied += u64::from(!changes.is_empty());
    }

    /// The GPUs that `wanted` includes: those that answer, and those that are sold and do not just now. Their health
    /// says so. Blocking.
    fn look(&self, wanted: &Gpus) -> Result<GpuSelection, String> {
        let mut gpus = match self.discovery.gpus(wanted) {
            Ok(gpus) => gpus,
            // A node may be left without any on purpose.
            Err(DiscoveryError::None { .. } | DiscoveryError::Unsellable(_)) => Vec::new(),
            Err(error) => return Err(error.to_string()),
        };
        let silent = self.discovery.silent();
        let is_silent = |gpu: &Gpu| silent.iter().any(|silent| silent.is(gpu));
        let stays = |gpu: &Gpu| {
            is_silent(gpu)
                && selected(gpu, &wanted.include, &wanted.exclude)
                && !gpus.iter().any(|found| found.uuid == gpu.uuid)
        };
        let sold: Vec<Gpu> = self.sold().into_iter().filter(stays).collect();
        gpus.extend(sold);
        gpus.sort_by_key(|gpu| (gpu.index, gpu.mig.as_ref().map(|mig| mig.index)));
        let topology = self.discovery.topology(&gpus);
        Ok(GpuSelection { gpus, topology })
    }

    /// Asks GPUs again that were left out because they did not answer, and has those sold that do. Blocking.
    pub fn ask_again(&self) {
        let silent = self.board.facts().silent;
        if silent.is_empty() {
            return;
        }
        // A driver that hangs must not keep a new configuration waiting.
        let config = self.current.get();
        let Ok(selection) = self.look(&config.gpus) else { return };
        let _still = lock(&self.seen);
        let Some(agent) = self.agent.get() else { return };
        let now = self.current.get();
        if now.gpus != config.gpus {
            return;
        }
        let sold = self.sold();
        let is_new = |gpu: &&Gpu| !sold.iter().any(|sold| sold.uuid == gpu.uuid);
        let new: Vec<&Gpu> = selection.gpus.iter().filter(is_new).collect();
        if new.is_empty() {
            return self.say_unsold();
        }
        let problems = capacity::check(&selection.gpus, &now);
        if let Some(problem) = problems.first() {
            let new: Vec<String> = new.iter().map(ToString::to_string).collect();
            let text = format!(
                "{} answers again and is not sold: with it the configuration is impossible: {}",
                new.join(", "),
                problem.message
            );
            return self.board.set_condition("unsold", Some(text));
        }
        let was_lost = |gpu: &&Gpu| silent.iter().any(|(silent, _)| silent.lost && silent.is(gpu));
        let (new, lost): (Vec<Gpu>, Vec<Gpu>) = (
            new.iter().copied().cloned().collect(),
            new.iter().copied().filter(was_lost).cloned().collect(),
        );
        agent.reload((*now).clone(), Some(selection));
        for gpu in lost {
            agent.inventory.was_gone(&gpu.uuid);
        }
        for gpu in new {
            info!(%gpu, "a GPU answers again and is sold");
        }
        self.say_unsold();
    }

    /// Names what is not sold, in the log and in `status`, as the driver was last asked.
    pub fn say_unsold(&self) {
        let sold = self.sold();
        let mut silent = self.discovery.silent();
        // Of what is sold its health speaks.
        silent.retain(|silent| !sold.iter().any(|gpu| silent.is(gpu)));
        let mut sentences = self.discovery.unsold();
        sentences.extend(silent.iter().map(ToString::to_string));
        self.board.set_silent(silent);
        let text = Some(sentences.join("; ")).filter(|text| !text.is_empty());
        self.board.set_condition("unsold", text);
    }

    fn sold(&self) -> Vec<Gpu> {
        self.agent.get().map_or_else(Vec::new, |agent| agent.inventory.catalogue().devices())
    }
}

fn mark(judged: &Judged) -> String {
    match judged.problems.first() {
        Some(problem) if judged.text.is_empty() => problem.message.clone(),
        _ => file::hash(&judged.text),
    }
}

/// Differences as they are logged and kept: of many the first.
fn texts(differences: &[Difference]) -> Vec<String> {
    let brief =
        |one: &Difference| printable::brief(&one.to_string(), LONGEST_DIFFERENCE).into_owned();
    counted::first(differences.iter().map(brief), MOST_DIFFERENCES)
}

fn described(changes: &[Difference], waiting: &[Difference]) -> Vec<String> {
    let mut lines = texts(changes);
    lines.extend(texts(waiting).into_iter().map(|text| format!("{text} (after a restart)")));
    lines
}

/// How often it is looked whether the file is another. It must rest as long before it is read: it may be written in pieces.
pub const DEBOUNCE: Duration = Duration::from_secs(1);
/// How often it is read although it looks the same.
const SELDOM: Duration = Duration::from_secs(60);

/// Reads the file again whenever that is due. Never ends.
pub async fn watch(reloader: Arc<Reloader>, rest: Duration) {
    let Some(path) = reloader.file().map(|file| file.path().to_owned()) else {
        return std::future::pending().await;
    };
    let mut hangup = match signal(SignalKind::hangup()) {
        Ok(hangup) => Some(hangup),
        Err(error) => {
            error!(%error, "SIGHUP is not heard");
            None
        }
    };
    let (mut seen, mut is_read, mut read_at) = (None, false, Instant::now());
    loop {
        let hung_up = async {
            match &mut hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        let why = tokio::select! {
            _ = hung_up => ReloadCause::Signal,
            () = tokio::time::sleep(rest) => {
                let now = stamp(&path).await;
                let rests = std::mem::replace(&mut seen, now) == now;
                is_read &= rests;
                if !rests || is_read && read_at.elapsed() < SELDOM {
                    continue;
                }
                ReloadCause::Change
            }
        };
        (is_read, read_at) = (true, Instant::now());
        let reading = Arc::clone(&reloader);
        if let Err(error) = tokio::task::spawn_blocking(move || reading.reload(&why)).await {
            error!(%error, "reading the configuration");
        }
    }
}

/// What tells one state of a file from another, wherever links lead to it: device, inode, size, and when it was written.
type Stamp = (u64, u64, u64, (i64, i64));

/// `None` where there is none.
async fn stamp(path: &Path) -> Option<Stamp> {
    let path = path.to_owned();
    let look = move || files::in_time(&path.clone(), move || std::fs::metadata(path));
    let meta = tokio::task::spawn_blocking(look).await.ok()?.ok()?.ok()?;
    Some((meta.dev(), meta.ino(), meta.size(), (meta.mtime(), meta.mtime_nsec())))
}
