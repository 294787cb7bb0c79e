//! What is asked of the history, from what is stored and what waits; what a series is of, and what a subject names, as
//! `tessera explain` takes it.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tessera_model::written_name;
use tessera_view::gpu::Gpu;
use tessera_view::history::{Answer, GpuPoint, GpuSeries, Query, TenantPoint, TenantSeries};
use tessera_view::node::Node;
use tessera_view::tenant::Tenant;
use tessera_view::{API_VERSION, SourceError, workload};

use super::fold::Folder;
use super::row::{Cell, Level, TICK_US, gpu, tenant};
use super::store::{Cells as Stored, Reader};

/// Most buckets of all series together, where the step is chosen here.
const MOST: usize = 20_000;
/// Most where the step was asked for.
const MOST_ASKED: usize = 100_000;

/// Where answers come from.
pub(crate) struct Known<'a> {
    pub reader: Option<&'a Reader>,
    pub folder: &'a Folder,
}

/// Buckets of a series by their seconds.
type Cells = BTreeMap<u32, Cell>;

/// See [`crate::History::answer`].
pub(crate) fn answer(
    query: &Query,
    now: &Node,
    known: &Known<'_>,
    mut remarks: Vec<String>,
) -> Result<Answer, SourceError> {
    let asked = Level::of_step(query.step_seconds);
    let until_ms = if query.until_unix_ms == 0 { now.at_unix_ms } else { query.until_unix_ms };
    if query.since_unix_ms > until_ms {
        return Err(SourceError::Invalid(
            "the window ends before it begins: since is later than until".to_owned(),
        ));
    }
    let (mut names, numbers) = names(known).map_err(unread)?;
    // What has no name in the history has its name from here, and is found before the first look at it.
    let there: Vec<Series> = now.tenants.iter().flat_map(series).collect();
    let is_new = |series: &&Series| !names.contains_key(&series.key);
    let new: BTreeSet<Key> = there.iter().filter(is_new).map(|series| series.key.clone()).collect();
    there.into_iter().for_each(|series| name(&mut names, series));
    let subject = find(&query.subject, &query.namespace, &names, &now.gpus)?;
    let wanted: BTreeSet<&Key> =
        names.keys().filter(|key| subject.wants(key, &names[*key], &query.namespace)).collect();
    let (since, until) = (second(query.since_unix_ms), second(until_ms));
    let oldest = oldest(known).map_err(unread)?;
    let wants: BTreeMap<u32, &Key> =
        numbers.iter().filter_map(|(number, key)| Some((*number, *wanted.get(key)?))).collect();
    let (level, cells) =
        read(known, asked, (since, until), &oldest, |number| wants.contains_key(&number))?;
    let from = since - since % level.step_seconds();
    let mut found: BTreeMap<&Key, Cells> = BTreeMap::new();
    for (number, cells) in cells {
        let Some(key) = wants.get(&number) else { continue };
        match found.entry(key) {
            Entry::Vacant(vacant) => {
                vacant.insert(cells);
            }
            // A series whose number was forgotten has a second one.
            Entry::Occupied(_) => {
                let mut add = |(second, cell)| add(&mut found, level, (key, second), &cell);
                cells.into_iter().for_each(&mut add);
            }
        }
    }
    for (second, cells) in known.folder.pending() {
        let start = second - second % level.step_seconds();
        for (key, cell) in cells.iter().filter(|_| (from..=until).contains(&start)) {
            if let Some(key) = wanted.get(&**key) {
                add(&mut found, level, (key, start), cell);
            }
        }
    }
    // Coarser buckets know more; before the beginning of it all there is nothing to know.
    let earliest = oldest.iter().flatten().min().copied();
    let oldest = oldest[level as usize];
    if let (Some(oldest), Some(earliest)) = (oldest, earliest)
        && oldest > since.saturating_add(level.step_seconds())
        && oldest >= earliest.saturating_add(3600)
    {
        let known = tessera_model::time_format::utc(i64::from(oldest) * 1000);
        remarks.push(format!(
            "buckets of {} s are known since {known} only; coarser ones go further back",
            level.step_seconds()
        ));
    }
    // A pod that was asked for is there, whether it was looked at yet or not.
    if matches!(subject, Subject::Tenants(_)) {
        for key in new.iter().filter(|key| wanted.contains(key)) {
            found.entry(key).or_default();
            let remark = not_looked_at(&names[key]);
            if !remarks.contains(&remark) {
                remarks.push(remark);
            }
        }
    }
    let (mut gpus, mut tenants) = (Vec::new(), Vec::new());
    for (key, cells) in found {
        let series = &names[key];
        if series.is_gpu() {
            let gpu = now.gpus.iter().find(|gpu| gpu.uuid == key.gpu_uuid);
            gpus.push(GpuSeries {
                gpu_uuid: key.gpu_uuid.clone(),
                index: gpu.map(|gpu| gpu.index),
                points: points(&cells, level, gpu_point),
            });
        } else {
            tenants.push(TenantSeries {
                id: key.id.clone(),
                generation: key.generation,
                namespace: series.namespace.clone(),
                pod: series.pod.clone(),
                container: series.container.clone(),
                workload: workload::of(&series.pod).to_owned(),
                gpu_uuid: key.gpu_uuid.clone(),
                live: new.contains(key) || known.folder.is_live(&key.id, key.generation),
                points: points(&cells, level, tenant_point),
            });
        }
    }
    gpus.sort_by_key(|series| series.index.unwrap_or(u32::MAX));
    // Those that live first, then the newest.
    let last = |series: &TenantSeries| series.points.last().map_or(0, |point| point.at_unix_ms);
    tenants.sort_by_key(|series| (!series.live, std::cmp::Reverse(last(series))));
    Ok(Answer {
        api_version: API_VERSION.to_owned(),
        node: now.node.clone(),
        at_unix_ms: now.at_unix_ms,
        step_seconds: level.step_seconds(),
        since_unix_ms: oldest.map_or(0, |oldest| i64::from(oldest) * 1000),
        gpus,
        tenants,
        events: Vec::new(),
        remarks,
    })
}

fn unread(error: impl std::fmt::Display) -> SourceError {
    SourceError::Unavailable(format!("the history cannot be read: {error}"))
}

/// A tenant's series, on each of its GPUs.
fn series(tenant: &Tenant) -> impl Iterator<Item = Series> {
    let Tenant { id, generation, namespace, pod, container, gpus, .. } = tenant;
    gpus.iter().map(|used| Series {
        key: Key { id: id.clone(), generation: *generation, gpu_uuid: used.gpu_uuid.clone() },
        namespace: namespace.clone(),
        pod: pod.clone(),
        container: container.clone(),
    })
}

/// What is said of a tenant before the first look at it.
fn not_looked_at(series: &Series) -> String {
    let Series { key, namespace, pod, .. } = series;
    let of = if pod.is_empty() { key.id.clone() } else { format!("{namespace}/{pod}") };
    let seconds = Level::Fine.step_seconds();
    format!("{of}: nothing was looked at yet; the plugin looks every {seconds} s")
}

fn second(unix_ms: i64) -> u32 {
    u32::try_from((unix_ms / 1000).clamp(0, i64::from(u32::MAX))).unwrap_or(0)
}

fn add<'k>(
    found: &mut BTreeMap<&'k Key, Cells>,
    level: Level,
    (key, second): (&'k Key, u32),
    cell: &Cell,
) {
    let cells = found.entry(key).or_default();
    cells.entry(second).and_modify(|before| before.add(level, cell)).or_insert(*cell);
}

/// Series by what they are of, and what the file's numbers mean.
type Names = (BTreeMap<Key, Series>, BTreeMap<u32, Key>);

fn names(known: &Known<'_>) -> Result<Names, redb::Error> {
    let (mut names, mut numbers) = (BTreeMap::new(), BTreeMap::new());
    if let Some(reader) = known.reader {
        reader.names(|number, series| {
            numbers.insert(number, series.key.clone());
            name(&mut names, series);
        })?;
    }
    known.folder.series().values().for_each(|series| name(&mut names, series.clone()));
    Ok((names, numbers))
}

/// A later name counts, if it is one.
fn name(names: &mut BTreeMap<Key, Series>, series: Series) {
    let known = names.entry(series.key.clone()).or_insert_with(|| series.clone());
    if !series.pod.is_empty() {
        *known = series;
    }
}

/// The oldest bucket of each level.
fn oldest(known: &Known<'_>) -> Result<[Option<u32>; 3], redb::Error> {
    let mut oldest = [None; 3];
    let pending = known.folder.pending().keys().next().copied();
    for (level, oldest) in Level::ALL.into_iter().zip(&mut oldest) {
        let stored = match known.reader {
            Some(reader) => reader.oldest_bucket(level)?,
            None => None,
        };
        let waiting = pending.map(|second| second - second % level.step_seconds());
        *oldest = stored.into_iter().chain(waiting).min();
    }
    Ok(oldest)
}

/// Buckets of the level that was asked for, or of the finest that has the whole window and not too many.
fn read(
    known: &Known<'_>,
    asked: Option<Level>,
    (since, until): (u32, u32),
    oldest: &[Option<u32>; 3],
    wanted: impl Fn(u32) -> bool,
) -> Result<(Level, Stored), SourceError> {
    let earliest = oldest.iter().flatten().min().copied().unwrap_or(until);
    // The coarsest begin up to an hour before what they are of.
    let whole = |level: &Level| {
        let oldest = oldest[*level as usize];
        oldest.is_none_or(|oldest| oldest <= since || oldest < earliest.saturating_add(3600))
    };
    let (levels, most) = match asked {
        Some(level) => (vec![level], MOST_ASKED),
        None => {
            let mut levels: Vec<Level> = Level::ALL.into_iter().filter(whole).collect();
            levels.extend((!levels.contains(&Level::Coarse)).then_some(Level::Coarse));
            (levels, MOST)
        }
    };
    for level in levels {
        let Some(reader) = known.reader else { return Ok((level, Stored::new())) };
        let from = since - since % level.step_seconds();
        // The coarsest may be asked of thousands of pods.
        let most = if asked.is_none() && level == Level::Coarse { MOST_ASKED } else { most };
        if let Some(cells) = reader.cells(level, (from, until), most, &wanted).map_err(unread)? {
            return Ok((level, cells));
        }
    }
    Err(SourceError::Invalid(format!(
        "more than {MOST_ASKED} buckets are too many for one answer: name a pod or GPU, ask for a shorter window or \
         a longer step"
    )))
}

fn points<P>(cells: &Cells, level: Level, point: fn(u32, &Cell) -> P) -> Vec<P> {
    cells.iter().map(|(second, cell)| point(*second, &cell.within(level))).collect()
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 * TICK_US as f64 / 1e6
}

fn tenant_point(second: u32, cell: &Cell) -> TenantPoint {
    TenantPoint {
        at_unix_ms: i64::from(second) * 1000,
        seconds: cell.ms as f64 / 1000.0,
        memory_used_bytes: cell.mean_kib << 10,
        memory_peak_bytes: cell.peak_kib << 10,
        memory_limit_bytes: cell.limit_kib << 10,
        memory_overhead_bytes: cell.overhead_kib << 10,
        cores_millis: cell.cores_millis,
        got_seconds: seconds(cell.counts[tenant::GOT]),
        used_seconds: seconds(cell.counts[tenant::USED]),
        measured_seconds: seconds(cell.counts[tenant::MEASURED]),
        used_peak_millis: cell.busiest_millis,
        waited_seconds: seconds(cell.counts[tenant::WAITED]),
        capped_seconds: seconds(cell.counts[tenant::CAPPED]),
        rationed_seconds: seconds(cell.counts[tenant::RATIONED]),
        refusals: cell.counts[tenant::REFUSALS],
        launches: cell.counts[tenant::LAUNCHES],
    }
}

fn gpu_point(second: u32, cell: &Cell) -> GpuPoint {
    GpuPoint {
        at_unix_ms: i64::from(second) * 1000,
        seconds: cell.ms as f64 / 1000.0,
        memory_used_bytes: cell.mean_kib << 10,
        memory_peak_bytes: cell.peak_kib << 10,
        memory_limits_bytes: cell.overhead_kib << 10,
        leased_seconds: seconds(cell.counts[gpu::LEASED]),
        leased_peak_millis: cell.busiest_millis,
        unhealthy_seconds: seconds(cell.counts[gpu::UNHEALTHY]),
        cordoned_seconds: seconds(cell.counts[gpu::CORDONED]),
    }
}

impl Subject {
    /// A GPU's own history comes with that of all that were on it.
    fn wants(&self, key: &Key, series: &Series, namespace: &str) -> bool {
        let in_namespace = namespace.is_empty() || series.namespace == namespace;
        match self {
            Subject::All => series.is_gpu() || in_namespace,
            Subject::Gpu(uuid) => key.gpu_uuid == *uuid && (series.is_gpu() || in_namespace),
            Subject::Tenants(ids) => ids.contains(&(key.id.clone(), key.generation)),
        }
    }
}

/// A tenant on one GPU, or a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The allocation; empty for a GPU's own.
    pub id: String,
    /// Which Allocate of this id; 0 for a GPU's own.
    pub generation: u64,
    pub gpu_uuid: String,
}

/// A series and its names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Series {
    pub key: Key,
    /// The pod's namespace; empty where kubelet never named it.
    pub namespace: String,
    pub pod: String,
    pub container: String,
}

impl Series {
    /// It is a GPU's own.
    pub fn is_gpu(&self) -> bool {
        self.key.id.is_empty()
    }
}

/// What is asked about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// Everything.
    All,
    /// A GPU, by its UUID.
    Gpu(String),
    /// Tenants, by id and generation.
    Tenants(BTreeSet<(String, u64)>),
}

/// Pods first, then claims' ids, containers, ids, GPUs.
pub(crate) fn find(
    subject: &str,
    namespace: &str,
    names: &BTreeMap<Key, Series>,
    gpus: &[Gpu],
) -> Result<Subject, SourceError> {
    let subject = subject.trim();
    if subject.is_empty() {
        return Ok(Subject::All);
    }
    let in_namespace = |series: &&Series| namespace.is_empty() || series.namespace == namespace;
    let tenants: Vec<&Series> =
        names.values().filter(|series| !series.is_gpu()).filter(in_namespace).collect();
    let held = |test: &dyn Fn(&Series) -> bool| -> BTreeSet<(String, u64)> {
        let held = tenants.iter().filter(|series| test(series));
        held.map(|series| (series.key.id.clone(), series.key.generation)).collect()
    };
    let parts: Vec<&str> = subject.split('/').collect();
    let mut found = match parts.as_slice() {
        [pod] => held(&|series| series.pod == *pod),
        [namespace, pod] => held(&|series| series.namespace == *namespace && series.pod == *pod),
        [namespace, pod, container] => held(&|series| {
            series.namespace == *namespace && series.pod == *pod && series.container == *container
        }),
        _ => BTreeSet::new(),
    };
    if found.is_empty() {
        found = held(&|series| series.container == subject);
    }
    if found.is_empty() {
        let ids: BTreeSet<&str> = tenants.iter().map(|series| series.key.id.as_str()).collect();
        if let Some(id) = beginning(&ids, subject)? {
            found = held(&|series| series.key.id == id);
        }
    }
    if !found.is_empty() {
        return Ok(Subject::Tenants(found));
    }
    if let Some(gpu) = gpus.iter().find(|gpu| gpu.index.to_string() == subject) {
        return Ok(Subject::Gpu(gpu.uuid.clone()));
    }
    let gone = names.values().filter(|series| series.is_gpu()).map(|series| &series.key.gpu_uuid);
    let uuids: BTreeSet<&str> =
        gpus.iter().map(|gpu| &gpu.uuid).chain(gone).map(String::as_str).collect();
    match beginning(&uuids, subject)? {
        Some(uuid) => Ok(Subject::Gpu(uuid.to_owned())),
        None => Err(nothing(subject, &tenants, &uuids)),
    }
}

fn beginning<'a>(ids: &BTreeSet<&'a str>, subject: &str) -> Result<Option<&'a str>, SourceError> {
    written_name::by_beginning(ids, subject)
        .map_err(|several| SourceError::NotFound(several.to_string()))
}

fn nothing(subject: &str, tenants: &[&Series], uuids: &BTreeSet<&str>) -> SourceError {
    let pods = tenants.iter().filter(|series| !series.pod.is_empty());
    let pods = pods.map(|series| format!("{}/{}", series.namespace, series.pod));
    let all = pods.chain(uuids.iter().map(ToString::to_string)).collect();
    let there_is = written_name::there_is(&written_name::proposals(all, subject));
    SourceError::NotFound(format!(
        "nothing is called \"{subject}\": no pod, container, allocation or GPU of this node, now or in its \
         history{there_is}"
    ))
}
