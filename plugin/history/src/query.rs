//! What is asked of the history, from what is stored and what waits; what a series is of, and what a subject names, as
//! `tessera explain` takes it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tessera_model::subject::{self, Called, Meant};
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

pub(crate) struct Known<'a> {
    pub reader: Option<&'a Reader>,
    pub folder: &'a Folder,
}

type Cells = BTreeMap<u32, Cell>;

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
    now.tenants.iter().flat_map(series).for_each(|series| name(&mut names, series));
    let subject = meant(query, &names, &now.gpus)?;
    let is_wanted = |one: &&Series| wants(subject.as_ref(), one, &query.namespace);
    let wanted: BTreeSet<&Key> = names.values().filter(is_wanted).map(|one| &one.key).collect();
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
        // A series whose number was forgotten has a second one.
        cells.iter().for_each(|(second, cell)| add(&mut found, level, (key, *second), cell));
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
                live: known.folder.is_live(&key.id, key.generation),
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

fn series(tenant: &Tenant) -> impl Iterator<Item = Series> {
    let Tenant { id, generation, namespace, pod, container, gpus, .. } = tenant;
    gpus.iter().map(|used| Series {
        key: Key { id: id.clone(), generation: *generation, gpu_uuid: used.gpu_uuid.clone() },
        namespace: namespace.clone(),
        pod: pod.clone(),
        container: container.clone(),
    })
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

/// A GPU's own history comes with that of all that were on it.
fn wants(subject: Option<&Meant>, series: &Series, namespace: &str) -> bool {
    let Key { id, generation, gpu_uuid } = &series.key;
    let is_there = series.is_gpu() || namespace.is_empty() || series.namespace == namespace;
    match subject {
        None => is_there,
        Some(Meant::Gpu(uuid)) => gpu_uuid == uuid && is_there,
        Some(Meant::Allocations(all)) => {
            all.contains(&subject::Key { id: id.clone(), generation: *generation })
        }
    }
}

/// What is meant of what there is and was; `None` for everything.
fn meant(
    query: &Query,
    names: &BTreeMap<Key, Series>,
    gpus: &[Gpu],
) -> Result<Option<Meant>, SourceError> {
    if query.subject.trim().is_empty() {
        return Ok(None);
    }
    let Query { namespace, .. } = query;
    let is_asked =
        |one: &&Series| !one.is_gpu() && (namespace.is_empty() || one.namespace == *namespace);
    let tenants = names.values().filter(is_asked).map(|one| Called {
        id: &one.key.id,
        generation: one.key.generation,
        namespace: &one.namespace,
        pod: &one.pod,
        container: &one.container,
        claim: "",
    });
    let tenants: Vec<Called<'_>> = tenants.collect();
    let now = gpus.iter().map(|gpu| (Some(gpu.index), gpu.uuid.as_str()));
    let gone =
        names.values().filter(|one| one.is_gpu()).map(|one| (None, one.key.gpu_uuid.as_str()));
    let gpus: Vec<_> = now.chain(gone).collect();
    let found = subject::find(&query.subject, &tenants, &gpus, "its history");
    found.map(Some).map_err(|unmeant| SourceError::NotFound(unmeant.to_string()))
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

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Series {
    pub key: Key,
    /// The pod's namespace; empty where kubelet never named it.
    pub namespace: String,
    pub pod: String,
    pub container: String,
}

impl Series {
    pub fn is_gpu(&self) -> bool {
        self.key.id.is_empty()
    }
}
