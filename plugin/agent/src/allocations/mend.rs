//! What containers are handed, with the CDI specs of it; and mended at the start and while nobody asks: kubelet says nothing before the container of
//! a claim starts again, and the runtime then fails for as long as a file is missing.
//!
//! A look costs a stat of each file. What is as it was when it was last whole is whole; what is not is judged, and mended,
//! as before a start. What a directory's end keeps from being mended is named. Installed shims that nobody needs any more
//! are removed here, too.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::unistd::{AccessFlags, access};
use tessera_config::Config;
use tessera_kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse};
use tessera_model::allocation_id::AllocationId;
use tessera_model::gpu::Gpu;
use tessera_model::record::Record;
use tessera_region::layout::{QUOTA_FILE, SESSION_SOCKET, USAGE_FILE};
use tessera_rules::allocate::{Catalogue, Refusal};
use tessera_system::locks::Ranked;
use tessera_tenant::delivery::cdi::{Put, Specs};
use tessera_tenant::delivery::{self, DeliveryPlan, cdi, driver};
use tessera_tenant::regions::Mode;
use tessera_tenant::shim_install::{self, PRELOAD, SHIM as LIBRARY};
use tracing::{error, info, warn};

use super::{AllocateError, Allocations};
use crate::Agent;
use crate::lock_order::LEAF;

const LOOK: Duration = Duration::from_secs(1);

/// What `status` says of a directory that is no more although it is mounted.
pub(crate) const REMOVED: &str = "removed";

const SHIM: &str = "shim";
const SPEC: &str = "CDI spec";
const PAGES: &str = "pages";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    file: (u64, u64),
    mode: u32,
    size: u64,
    changed: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        let meta = path.symlink_metadata().ok()?;
        let (size, changed) = (meta.size(), (meta.ctime(), meta.ctime_nsec()));
        Some(Stamp { file: (meta.dev(), meta.ino()), mode: meta.mode(), size, changed })
    }

    /// Of something that is written to all the time.
    fn of_living(path: &Path) -> Option<Self> {
        let stamp = Stamp::of(path)?;
        let is_dir = stamp.mode & nix::libc::S_IFMT == nix::libc::S_IFDIR;
        // A tenant that cuts its usage page tampers, which housekeeping judges.
        let is_tenants = path.ends_with(USAGE_FILE);
        let size = if is_dir || is_tenants { 0 } else { stamp.size };
        Some(Stamp { size, changed: (0, 0), ..stamp })
    }
}

#[derive(Debug)]
pub(super) struct Whole(Ranked<BTreeMap<PathBuf, Stamp>>);

impl Default for Whole {
    fn default() -> Self {
        Whole(Ranked::new(LEAF, BTreeMap::new()))
    }
}

impl Whole {
    /// Takes down how something is now that is whole.
    fn note(&self, path: &Path, stamp: fn(&Path) -> Option<Stamp>) {
        let stamp = stamp(path);
        let mut known = self.0.lock();
        known.remove(path);
        known.extend(stamp.map(|stamp| (path.to_owned(), stamp)));
    }

    fn known(&self, path: &Path) -> Option<Stamp> {
        self.0.lock().get(path).copied()
    }

    fn is(&self, path: &Path) -> bool {
        self.known(path).is_some_and(|known| Stamp::of(path) == Some(known))
    }

    /// Whether it is as it was, as far as that is known.
    fn may_be_living(&self, path: &Path) -> bool {
        let now = Stamp::of_living(path);
        now.is_some() && self.known(path).is_none_or(|known| now == Some(known))
    }

    fn keep(&self, paths: &BTreeSet<PathBuf>) {
        self.0.lock().retain(|path, _| paths.contains(path));
    }
}

impl Allocations {
    /// Looks at all that containers start with, and mends what is not whole: of which allocation what. Blocking.
    pub(crate) fn mend(&self) -> Vec<(Arc<Record>, Vec<&'static str>)> {
        self.check_directories();
        let records = self.records();
        let restored = self.mend_shims(&records);
        let mut all = Vec::new();
        for record in &records {
            let mut what = self.mend_one(record);
            if record.shim.as_ref().is_some_and(|name| restored.contains(name)) {
                what.push(SHIM);
            }
            if !what.is_empty() {
                warn!(id = %record.id, ?what, "missing or damaged; restored");
                all.push((Arc::clone(record), what));
            }
        }
        self.mend_views();
        self.whole.keep(&self.started_with(&records));
        all
    }

    pub(super) fn mend_shims(&self, records: &[Arc<Record>]) -> BTreeSet<String> {
        let mut restored = BTreeSet::new();
        for name in records.iter().filter_map(|record| record.shim.clone()).collect::<BTreeSet<_>>()
        {
            let files = shim_files(&self.paths.shim, &name);
            if files.iter().all(|file| self.whole.is(file)) {
                continue;
            }
            // Two that write one file would be in each other's way.
            let _writer = self.journal.writer();
            // What cannot be done is said in `status`.
            let Ok(is_restored) = self.restore_shim(&name) else { continue };
            files.iter().for_each(|file| self.whole.note(file, Stamp::of));
            if is_restored {
                restored.insert(name);
            }
        }
        restored
    }

    fn mend_one(&self, record: &Record) -> Vec<&'static str> {
        let mut mended = Vec::new();
        let spec = self.specs().path(&record.id);
        let lacks_spec = || record.cdi && !self.whole.is(&spec);
        let pages = self.page_files(record);
        if !lacks_spec() && self.are_whole(record, &pages) {
            return mended;
        }
        let mut writer = self.journal.writer();
        // It may have changed, or ended, since.
        let Some(record) = self.record(&record.id) else { return mended };
        if lacks_spec() {
            // What cannot be done is said in `status`.
            if let Ok(put) = self.ensure_delivered(&record) {
                self.whole.note(&spec, Stamp::of);
                if put != Put::Unchanged {
                    mended.push(SPEC);
                }
            }
        }
        if !self.are_whole(&record, &pages) {
            open_up(&pages);
            if self.admit_recorded(&mut writer, &record, Mode::Adopt).is_ok() {
                mended.push(PAGES);
            }
        }
        mended
    }

    /// The directory of an allocation's pages, and the files in it.
    fn page_files(&self, record: &Record) -> [PathBuf; 4] {
        let dir = self.pages_of(&record.id);
        [dir.clone(), dir.join(QUOTA_FILE), dir.join(USAGE_FILE), dir.join(SESSION_SOCKET)]
    }

    fn are_whole(&self, record: &Record, pages: &[PathBuf; 4]) -> bool {
        // One that is not open is opened by housekeeping.
        let Some(region) = self.pages.get(&record.id) else { return true };
        let spec = region.spec();
        let is_its = spec.allocation == record.id.as_str() && spec.generation == record.generation;
        let is_open =
            |path: &PathBuf| path.symlink_metadata().is_ok_and(|meta| lacking(&meta) == 0);
        is_its && pages.iter().all(|path| self.whole.may_be_living(path) && is_open(path))
    }

    pub(super) fn note_pages(&self, record: &Record) {
        self.page_files(record).iter().for_each(|path| self.whole.note(path, Stamp::of_living));
    }

    fn mend_views(&self) {
        let (catalogue, specs) = (self.inventory.catalogue(), self.specs());
        for sold in catalogue.gpus.values() {
            let id = cdi::view_id(&sold.gpu);
            let spec = specs.path(&id);
            // Nobody records who was handed a view, and a container may start again from one.
            let is_handed_out = self.whole.known(&spec).is_some() || specs.exists(&id);
            if !is_handed_out || self.whole.is(&spec) {
                continue;
            }
            let _writer = self.journal.writer();
            match self.put_view(&sold.gpu) {
                Ok(Put::Unchanged) => {}
                Ok(_) => warn!(
                    gpu = sold.gpu.uuid,
                    "the CDI spec that shows a GPU was missing or damaged; restored"
                ),
                Err(error) => {
                    warn!(gpu = sold.gpu.uuid, %error, "the CDI spec that shows a GPU cannot be made")
                }
            }
        }
    }

    fn started_with(&self, records: &[Arc<Record>]) -> BTreeSet<PathBuf> {
        let specs = self.specs();
        let shims = records.iter().filter_map(|record| record.shim.as_ref());
        let shims = shims.flat_map(|name| shim_files(&self.paths.shim, name));
        let own = records.iter().map(|record| specs.path(&record.id));
        let pages = records.iter().flat_map(|record| self.page_files(record));
        let catalogue = self.inventory.catalogue();
        let views = catalogue.gpus.values().map(|sold| specs.path(&cdi::view_id(&sold.gpu)));
        shims.chain(own).chain(pages).chain(views).collect()
    }

    /// Sees to it that the shim of that name is there to be mounted, with the line that preloads it. A
    /// look at the files is enough here; their content is compared when the plugin starts.
    pub(super) fn ensure_shim(&self, name: Option<&str>) -> Result<(), AllocateError> {
        let Some(name) = name else { return Ok(()) };
        let path = self.paths.shim.join(name).join(LIBRARY);
        let there = |path: &Path| path.metadata().is_ok_and(|m| m.is_file() && m.len() > 0);
        if there(&path) && there(&path.with_file_name(PRELOAD)) {
            return Ok(());
        }
        match self.restore_shim(name) {
            Ok(_) => Ok(()),
            Err(error) => Err(AllocateError::Shim { path, error }),
        }
    }

    fn restore_shim(&self, name: &str) -> Result<bool, shim_install::ShimError> {
        let paths = &self.paths;
        let source = paths.shim_source.clone().unwrap_or_else(shim_install::default_source);
        let restored = shim_install::restore(&source, &paths.shim, name);
        self.board.keep(name, "shim", &restored, ToString::to_string);
        let restored = restored?;
        if restored {
            self.pages.forget_shim(name);
            warn!(name, "a shim that containers mount was missing or damaged; restored");
        }
        Ok(restored)
    }

    /// Removes installed shims that no container has needed for `grace`. Blocking.
    pub fn sweep_shims(&self, grace: Duration) {
        let dir = &self.paths.shim;
        let Some(current) = shim_install::name_of(&self.delivery) else { return };
        let records = self.records.lock().clone();
        let mut since = self.unused.lock();
        let now = Instant::now();
        let installed = shim_install::installed(dir);
        let needed = records.values().map(AsRef::as_ref);
        for name in shim_install::unneeded(&installed, &current, needed, &mut since, grace, now) {
            match shim_install::remove(dir, &name) {
                Ok(()) => {
                    self.pages.forget_shim(&name);
                    self.board.forget(&name);
                    info!(name, "removed a shim that nobody needs any more");
                }
                Err(error) => {
                    since.remove(&name);
                    warn!(name, %error, "a shim that nobody needs cannot be removed");
                }
            }
        }
    }

    /// Says which directory was removed although this process still has it: mounted, it cannot be made again from here.
    fn check_directories(&self) {
        let config = self.config.get();
        let paths = &self.paths;
        let is_claimed = self.board.facts().dra.is_some();
        let is_cdi = config.container.device_list_strategy.is_cdi()
            || self.records.lock().values().any(|record| record.cdi);
        let all = [
            ("cdi.directory", &config.cdi.directory, is_cdi || is_claimed),
            ("paths.shim", &paths.shim, true),
            ("paths.pages", &paths.pages, true),
            ("paths.kubelet", &paths.kubelet, true),
            ("paths.plugins_registry", &paths.plugins_registry, is_claimed),
            ("paths.dra", &paths.dra, is_claimed),
        ];
        for (key, path, is_used) in all {
            let is_gone = is_used && std::fs::metadata(path).is_ok_and(|meta| meta.nlink() == 0);
            if !is_gone {
                self.board.lift(key, REMOVED);
                continue;
            }
            let text = format!(
                "{key}: {} was removed from the node, and the plugin's pod still has what is no more: no container that \
                 needs it can start; delete the plugin's pod, so that its next one mounts what is there now",
                path.display()
            );
            self.board.stand(key, REMOVED, text);
        }
    }
}

/// Gives containers of any user the rights that they need. Containers have the directory read-only, so none can have
/// put a link there.
fn open_up(pages: &[PathBuf]) {
    // The directory first: what is in it may be out of reach.
    for path in pages {
        let Ok(meta) = path.symlink_metadata() else { continue };
        let lacking = lacking(&meta);
        let mode = std::fs::Permissions::from_mode(meta.mode() & 0o7777 | lacking);
        if lacking != 0
            && !meta.is_symlink()
            && let Err(error) = std::fs::set_permissions(path, mode)
        {
            warn!(path = %path.display(), %error, "containers of other users cannot use it");
        }
    }
}

fn shim_files(dir: &Path, name: &str) -> [PathBuf; 2] {
    let given = shim_install::at(dir, name);
    [given.shim, given.preload]
}

fn lacking(meta: &std::fs::Metadata) -> u32 {
    let needed = match meta.file_type() {
        kind if kind.is_dir() => 0o755,
        kind if kind.is_file() => 0o444,
        // A socket: who connects, writes.
        _ => 0o666,
    };
    needed & !meta.mode()
}

/// Sees to it that running pods' containers can start again, until it is dropped.
pub async fn keep(agent: Arc<Agent>) {
    loop {
        let looking = Arc::clone(&agent);
        if let Err(error) = tokio::task::spawn_blocking(move || looking.mend()).await {
            error!(%error, "a look at what containers start with");
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// What `status` calls the directory of CDI specs by.
const CDI_DIRECTORY: &str = "cdi.directory";

/// Whether an allocation that is known only by its pages needs a spec: better one too many.
pub(super) fn is_adopted_as_cdi(config: &Config, id: &AllocationId) -> bool {
    config.container.device_list_strategy.is_cdi() || Specs::new(&config.cdi.directory).exists(id)
}

impl Allocations {
    pub(super) fn specs(&self) -> Specs {
        Specs::new(&self.config.get().cdi.directory)
    }

    /// What the container of an allocation is given; its spec is there then, if it has one.
    pub(super) fn deliver(
        &self,
        catalogue: &Catalogue,
        record: &Record,
    ) -> Result<ContainerAllocateResponse, AllocateError> {
        self.with_delivery_plan(catalogue, record, |plan| {
            if record.cdi {
                self.put_spec(plan)?;
            }
            if record.origin.claim().is_some() {
                // Kubelet's DRA manager knows nothing else.
                let names = cdi::names(plan, &self.config.get()).into_iter();
                let cdi_devices = names.map(|name| CdiDevice { name }).collect();
                return Ok(ContainerAllocateResponse { cdi_devices, ..Default::default() });
            }
            Ok(delivery::answer(plan, &self.config.get()))
        })
    }

    /// Before a container starts with what it was handed once: that the driver and the spec are there.
    /// The caller holds `writer`, or is alone: two that write one spec would be in each other's way.
    pub(super) fn ensure_delivered(&self, record: &Record) -> Result<Put, AllocateError> {
        let catalogue = self.inventory.catalogue();
        // Which shim it was given, and how a GPU is reached that is not sold any more, is in the spec and nowhere else.
        let is_sold = record.grants.iter().all(|grant| catalogue.gpus.contains_key(&grant.uuid));
        let is_known = record.shim.is_some() && is_sold || !self.specs().is_whole(&record.id);
        let ensured =
            self.with_delivery_plan(&catalogue, record, |plan| match record.cdi && is_known {
                true => self.put_spec(plan),
                false => Ok(Put::Unchanged),
            });
        let text =
            |error: &AllocateError| format!("allocation {} cannot start again: {error}", record.id);
        self.board.keep(record.id.as_str(), "delivery", &ensured, text);
        ensured
    }

    fn with_delivery_plan<T>(
        &self,
        catalogue: &Catalogue,
        record: &Record,
        then: impl FnOnce(&DeliveryPlan<'_>) -> Result<T, AllocateError>,
    ) -> Result<T, AllocateError> {
        let known = record.grants.iter().filter_map(|grant| catalogue.gpus.get(&grant.uuid));
        let gpus: Vec<_> = known.map(|sold| &sold.gpu).collect();
        let parts = driver::parts(&self.config.get(), &gpus, record.cdi)?;
        let pages = self.pages_of(&record.id);
        let named = record.shim.as_deref().map(|name| shim_install::at(&self.paths.shim, name));
        let shim = named.as_ref().unwrap_or(&self.delivery);
        let by_cdi_alone = record.origin.claim().is_some();
        then(&DeliveryPlan { id: &record.id, gpus, pages: &pages, shim, parts, by_cdi_alone })
    }

    fn put_spec(&self, plan: &DeliveryPlan<'_>) -> Result<Put, AllocateError> {
        let spec = cdi::spec(plan, &self.config.get());
        let put = self.specs().put(plan.id, &spec)?;
        self.board.lift(CDI_DIRECTORY, "writable");
        if put == Put::Replaced {
            warn!(id = %plan.id, "something else lay where the CDI spec belongs; replaced");
        }
        self.whole.note(&self.specs().path(plan.id), Stamp::of);
        Ok(put)
    }

    pub(super) fn remove_spec(&self, id: &AllocationId) {
        if let Err(error) = self.specs().remove(id) {
            warn!(%id, %error, "the CDI spec of a released allocation cannot be removed");
        }
    }

    /// At the start: no spec is there that is nobody's.
    pub(super) fn sweep_specs(&self) {
        let (records, catalogue) = (self.records.lock().clone(), self.inventory.catalogue());
        // Nobody records who was handed a view.
        let views: BTreeSet<_> =
            catalogue.gpus.values().map(|sold| cdi::view_id(&sold.gpu)).collect();
        let kept = |id: &AllocationId| {
            views.contains(id) || records.get(id).is_some_and(|record| record.cdi)
        };
        for id in self.specs().sweep(kept) {
            info!(%id, "removed the CDI spec of an allocation that is no more");
        }
        if self.config.get().container.device_list_strategy.is_cdi() {
            self.check_directory();
        }
    }

    /// Names of CDI devices that show a GPU and grant nothing of it; the spec is there then, and stays.
    pub(crate) fn view(&self, uuid: &str) -> Result<Vec<String>, AllocateError> {
        let catalogue = self.inventory.catalogue();
        let unknown = || Refusal::UnknownGpu(uuid.to_owned());
        let gpu = &catalogue.gpus.get(uuid).ok_or_else(unknown)?.gpu;
        // One writer of specs at a time.
        let _writer = self.journal.writer();
        self.put_view(gpu)?;
        Ok(cdi::view_names(gpu, &self.config.get()))
    }

    pub(super) fn put_view(&self, gpu: &Gpu) -> Result<Put, AllocateError> {
        let config = self.config.get();
        let parts = driver::parts(&config, &[gpu], true)?;
        let (specs, id) = (self.specs(), cdi::view_id(gpu));
        let put = specs.put(&id, &cdi::view_spec(gpu, &parts, &config))?;
        self.whole.note(&specs.path(&id), Stamp::of);
        Ok(put)
    }

    /// Says at once what every Allocate would say.
    pub(crate) fn check_directory(&self) {
        let config = self.config.get();
        let directory = &config.cdi.directory;
        let usable = std::fs::create_dir_all(directory)
            .and_then(|()| Ok(access(directory, AccessFlags::W_OK | AccessFlags::X_OK)?));
        self.board.keep(CDI_DIRECTORY, "writable", &usable, |error| {
            format!(
                "no container can start: cdi.directory {} cannot be written ({error}); mount it \
                 writable, or choose another that the container runtime reads",
                directory.display()
            )
        });
    }
}
