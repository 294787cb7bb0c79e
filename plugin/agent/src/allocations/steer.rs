//! Changing limits of a running allocation.
//!
//! All of it happens under the writer's lock, as Allocate does, so that the two see each other's whole
//! work or nothing of it. What grows goes from the outside in: ledger, then kubelet's device list, then the
//! page. What shrinks goes from the inside out: the page first, then a look at what is in use *after*
//! that, then the ledger, which makes room for others. A request of the tenant that this look does not
//! see was made after the page said the new limit, and was judged by it.
//!
//! Limits below what is in use are refused, or forced and owed until the tenant has let go of it. Of a GPU that is sold by
//! claims the scheduler learns by the ResourceSlice what limits take or give back.
//! Whose limits are meant is said by a pod's name or an allocation's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use tessera_model::allocation_id::AllocationId;
use tessera_model::audit::{Actor, Event, Limits, What};
use tessera_model::clock::unix_ms;
use tessera_model::counted::plural;
use tessera_model::quantity::{format_bytes, format_compared};
use tessera_model::record::{Grant, Holder, Record};
use tessera_model::sharing::Compute;
use tessera_model::subject::{self, Called, Meant, Unmeant};
use tessera_rules::allocate::{AdvertisedGpu, Refusal};
use tessera_rules::capacity::{Capacity, Left};
use tessera_rules::shares::FrontEnd;
use tessera_store::{Change, CommitError};
use tessera_tenant::regions::Region;
use tessera_view::API_VERSION;
use tessera_view::change::{QuotaChange, QuotaResponse};
use tracing::{info, warn};

use super::room::{offers, on};
use super::{Allocations, Records, room};
pub use tessera_view::change::{ResetQuotaRequest, SetQuotaRequest, Target};

/// Why something stays as it is. The text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum SteerError {
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    NoRoom(String),
    #[error(transparent)]
    Ledger(#[from] CommitError),
}

impl Allocations {
    /// Changes the limits of what `order` names to those of `set`, or to those at Allocate.
    pub(crate) fn steer(
        &self,
        order: &ResetQuotaRequest,
        set: Option<&SetQuotaRequest>,
        actor: Actor,
    ) -> Result<QuotaResponse, SteerError> {
        let mut writer = self.journal.writer();
        let record = self.find(&order.target)?;
        let grants = match set {
            Some(request) => self.wanted(&record, request)?,
            None => record.allocated().to_vec(),
        };
        let region = self.pages.get(&record.id);
        let mut notes = Vec::new();
        for (old, new) in record.grants.iter().zip(&grants) {
            self.check_growth(&record, old, new)?;
        }
        let (owed, in_use) = shrink(region.as_deref(), &record, &grants, order, &mut notes)?;
        let after = Arc::new(record.with_limits(grants, owed));
        self.remark(&record, &after, &mut notes);
        notes.extend(self.taken(&record, &after));
        let gpus = record.grants.iter().zip(&after.grants).zip(in_use);
        let response = QuotaResponse {
            api_version: API_VERSION.to_owned(),
            allocation_id: record.id.to_string(),
            holder: record.holder.clone(),
            gpus: gpus
                .map(|((before, after), memory_in_use_bytes)| QuotaChange {
                    gpu_uuid: after.uuid.clone(),
                    before: before.into(),
                    after: after.into(),
                    memory_in_use_bytes,
                })
                .collect(),
            changed: record.grants != after.grants,
            dry_run: order.dry_run,
            notes,
        };
        if order.dry_run || after == record {
            return Ok(response);
        }
        let limits = |record: &Record| record.grants.iter().map(Limits::from).collect();
        let (before, now) = (limits(&record), limits(&after));
        let forced = after.overridden.as_ref().is_some_and(|over| !over.owed.is_empty());
        let what = match set {
            Some(_) => What::QuotaSet { before, after: now, forced },
            None => What::QuotaReset { before, after: now },
        };
        let reason = Some(order.reason.clone()).filter(|reason| !reason.is_empty());
        let event = Event { reason, ..Event::of(&after, what, unix_ms()).by(actor) };
        info!(id = %after.id, by = ?event.by, "{}", event.sentence("it"));
        let change =
            Change { put: vec![Record::clone(&after)], events: vec![event], ..Change::default() };
        if let Err(error) = writer.ledger.commit(&change) {
            if let Some(region) = &region {
                region.set_limits(&record.grants);
            }
            return Err(error.into());
        }
        self.store(&change);
        Ok(response)
    }

    /// Writes what the record says by now to the pages, and has the arbiter follow. Called once kubelet has heard
    /// of the room that is gone, before anybody can use it.
    pub(crate) fn apply_limits(&self, id: &AllocationId) {
        // A later change has written it, or is going to.
        let _writer = self.journal.writer();
        if let Some(record) = self.record(id) {
            self.engines.iter().for_each(|engine| engine.set_limits(&record));
        }
    }

    fn wanted(&self, record: &Record, request: &SetQuotaRequest) -> Result<Vec<Grant>, SteerError> {
        let invalid = |text: String| Err(SteerError::Invalid(text));
        let SetQuotaRequest { memory_limit_bytes: memory, cores_millis: cores, .. } = request;
        let (compute, gpu) = (request.policy, request.gpu.as_str());
        if memory.is_none() && cores.is_none() && compute.is_none() {
            return invalid("say what to change: --memory, --cores or --policy".to_owned());
        }
        if cores.is_some_and(|millis| !(1..=1000).contains(&millis)) {
            return invalid("--cores must be a part of a GPU, from 0.1 to 100 percent".to_owned());
        }
        let several = record.grants.len() > 1;
        if several && !gpu.is_empty() && (cores.is_some() || compute.is_some()) {
            return invalid(
                "an allocation's GPUs are leased together: change --cores and --policy without --gpu"
                    .to_owned(),
            );
        }
        let catalogue = self.inventory.catalogue();
        let meant = |uuid: &str| {
            let is_named = |sold: &AdvertisedGpu| sold.gpu.is_named(gpu);
            gpu.is_empty() || gpu == uuid || catalogue.gpus.get(uuid).is_some_and(is_named)
        };
        if !record.grants.iter().any(|grant| meant(&grant.uuid)) {
            let uuids: Vec<&str> = record.grants.iter().map(|grant| grant.uuid.as_str()).collect();
            return Err(SteerError::NotFound(format!(
                "{} has nothing of GPU {gpu}; it has {}",
                describe(record),
                uuids.join(", ")
            )));
        }
        let mut grants = record.grants.clone();
        for grant in grants.iter_mut().filter(|grant| meant(&grant.uuid)) {
            if let Some(bytes) = *memory {
                if bytes <= grant.context_overhead_bytes {
                    let [memory, context] = format_compared(bytes, grant.context_overhead_bytes);
                    return invalid(format!(
                        "{memory} is not more than one CUDA context takes ({context}, \
                         gpus.context_overhead): nothing could run"
                    ));
                }
                grant.memory_limit_bytes = bytes;
            }
            grant.cores_millis = cores.unwrap_or(grant.cores_millis);
            grant.compute = compute.unwrap_or(grant.compute);
        }
        Ok(grants)
    }

    fn check_growth(&self, record: &Record, old: &Grant, new: &Grant) -> Result<(), SteerError> {
        if new.memory_limit_bytes <= old.memory_limit_bytes {
            return Ok(());
        }
        let catalogue = self.inventory.catalogue();
        let Some(sold) = catalogue.gpus.get(&new.uuid) else {
            return Err(SteerError::Refused(format!(
                "GPU {} is not sold on this node any more; limits there can only shrink",
                new.uuid
            )));
        };
        let records = self.records.lock();
        let live = || on(&records, &new.uuid);
        let before = room::limits(live(), &new.uuid);
        let others = room::limits(live().filter(|other| other.id != record.id), &new.uuid);
        drop(records);
        let capacity = Capacity::of(&sold.gpu, &self.config.get());
        if capacity.grants(before, others, new.memory_limit_bytes) {
            return Ok(());
        }
        Err(SteerError::NoRoom(format!(
            "GPU {} has {} beside the reserve, and the limits of others take {}: at most {} are \
             possible; lower another's limit, or end it",
            new.uuid,
            format_bytes(capacity.sellable()),
            format_bytes(others),
            format_bytes(capacity.sellable().saturating_sub(others)),
        )))
    }

    fn remark(&self, before: &Record, after: &Arc<Record>, notes: &mut Vec<String>) {
        let records = self.records.lock().clone();
        let catalogue = self.inventory.catalogue();
        let offered = |records: &Records| {
            let devices = offers(&catalogue, records, &|uuid| self.inventory.withheld_of(uuid));
            devices.values().flatten().filter(|device| device.healthy).count()
        };
        let mut changed = records.clone();
        changed.insert(after.id.clone(), Arc::clone(after));
        let (was, now) = (offered(&records), offered(&changed));
        let changed = plural(was.abs_diff(now), "replica");
        if now < was {
            notes.push(format!("{changed} given out no more while the limits are so large"));
        } else if now > was {
            notes.push(format!("{changed} given out again"));
        }
        for grant in after.grants.iter().filter(|grant| grant.compute != Compute::None) {
            let others = records.values().filter(|other| other.is_live() && other.id != after.id);
            let others = others.flat_map(|other| &other.grants);
            let others = others.filter(|o| o.uuid == grant.uuid && o.compute != Compute::None);
            let sum = others.fold(grant.cores_millis, |sum, o| sum.saturating_add(o.cores_millis));
            let is_more = before.grants.iter().any(|before| {
                before.uuid == grant.uuid && before.cores_millis < grant.cores_millis
            });
            if sum > 1000 && is_more {
                notes.push(format!(
                    "the shares of GPU {} now add up to {}.{} %: under contention each gets its part \
                     of that",
                    grant.uuid,
                    sum / 10,
                    sum % 10
                ));
            }
        }
    }

    /// A parked allocation comes back: with its changed limits if there is room for them by now, else with
    /// those it was allocated with, which its replicas stand for.
    ///
    /// Errors: Others were given the room of these as well.
    pub(super) fn revive(&self, record: &mut Record, change: &mut Change) -> Result<(), Refusal> {
        if record.is_live() || self.check_start(record).is_ok() {
            return Ok(());
        }
        let reset = record.with_limits(record.allocated().to_vec(), BTreeMap::new());
        self.check_start(&reset)?;
        warn!(id = %record.id, "its changed limits have no room any more and are reset");
        let limits = |grants: &[Grant]| grants.iter().map(Limits::from).collect();
        let before = limits(&record.grants);
        *record = reset;
        let what = What::QuotaReset { before, after: limits(&record.grants) };
        let reason = "others were given the room while its replicas were elsewhere";
        change.events.push(Event::of(record, what, unix_ms()).by(Actor::Plugin).because(reason));
        Ok(())
    }

    /// Frees what allocations have let go of that were forced below their use; true if there is any. Blocking.
    pub(crate) fn settle_owed(&self) -> bool {
        let owes = |record: &Record| record.overridden.as_ref().is_some_and(|o| !o.owed.is_empty());
        if !self.records.lock().values().any(|record| owes(record)) {
            return false;
        }
        let mut writer = self.journal.writer();
        let owing: Vec<Arc<Record>> =
            self.records.lock().values().filter(|record| owes(record)).cloned().collect();
        let mut change = Change::default();
        for record in owing {
            let region = self.pages.get(&record.id);
            // What cannot be read still owes it.
            let Some(region) = region else { continue };
            let used = in_use(&region, record.grants.len());
            let mut owed = BTreeMap::new();
            for (grant, used) in record.grants.iter().zip(used) {
                let over = used.saturating_sub(grant.memory_limit_bytes);
                let left = over.min(record.owed_bytes(&grant.uuid));
                if left > 0 {
                    owed.insert(grant.uuid.clone(), left);
                }
            }
            let settled = record.with_limits(record.grants.clone(), owed);
            if settled != *record {
                change.put.push(settled);
            }
        }
        if change.is_empty() {
            return false;
        }
        if let Err(error) = writer.ledger.commit(&change) {
            // Tried again at the next round.
            warn!(%error, "what was let go of is not sold yet");
            return false;
        }
        self.store(&change);
        true
    }

    /// A sentence for each GPU whose room for claims is another.
    fn taken(&self, before: &Record, after: &Record) -> Vec<String> {
        let (catalogue, config) = (self.inventory.catalogue(), self.config.get());
        let records = self.records.lock();
        let claimed = after.grants.iter().filter_map(|grant| catalogue.gpus.get(&grant.uuid));
        let claimed = claimed.filter(|sold| sold.seller == FrontEnd::Dra);
        let sentence = |sold: &AdvertisedGpu| {
            let capacity = Capacity::of(&sold.gpu, &config);
            let uuid = &sold.gpu.uuid;
            let others = || on(&records, uuid).filter(|other| other.id != after.id);
            let free = |own| Left::beside(capacity, uuid, others().chain([own])).memory_bytes;
            let (was, is) = (free(before), free(after));
            let (taken, given) = (was.saturating_sub(is), is.saturating_sub(was));
            match (taken, given) {
                (0, 0) => None,
                (0, given) => Some(format!(
                    "{} has {} more for new claims, {} in all",
                    sold.gpu,
                    format_bytes(given),
                    format_bytes(is)
                )),
                (taken, _) => Some(format!(
                    "it takes {} of the {} that {} has for new claims: none of more than {} finds room there. A \
                     claim that is allocated and not prepared yet is not known here: where it does not fit any more, \
                     its pod is refused until these limits are lowered",
                    format_bytes(taken),
                    format_bytes(was),
                    sold.gpu,
                    format_bytes(is)
                )),
            }
        };
        claimed.filter_map(sentence).collect()
    }
}

/// Bytes by UUID; see [`tessera_model::steered::Override::owed`].
type Owed = BTreeMap<String, u64>;

/// Lowers limits in the page and looks whether what is in use fits. What each GPU still owes then, and
/// what is in use.
///
/// Errors: It does not fit and nobody forces it; the page is as before.
fn shrink(
    region: Option<&Region>,
    record: &Record,
    grants: &[Grant],
    order: &ResetQuotaRequest,
    notes: &mut Vec<String>,
) -> Result<(Owed, Vec<Option<u64>>), SteerError> {
    let lower: Vec<Grant> = record
        .grants
        .iter()
        .zip(grants)
        .map(|(old, new)| match new.memory_limit_bytes < old.memory_limit_bytes {
            true => Grant { memory_limit_bytes: new.memory_limit_bytes, ..old.clone() },
            false => old.clone(),
        })
        .collect();
    let shrinks = lower != record.grants;
    if let Some(region) = region.filter(|_| shrinks && !order.dry_run) {
        region.set_limits(&lower);
        // Its partner is the fence between a request's charge and its look at the limit.
        fence(Ordering::SeqCst);
    }
    let used = region.map(|region| in_use(region, grants.len()));
    let restore = || {
        if let Some(region) = region.filter(|_| shrinks && !order.dry_run) {
            region.set_limits(&record.grants);
        }
    };
    let mut owed = Owed::new();
    for (i, (old, new)) in record.grants.iter().zip(grants).enumerate() {
        let uuid = &new.uuid;
        let (limit, counted) = (
            new.memory_limit_bytes,
            old.memory_limit_bytes.saturating_add(record.owed_bytes(uuid)),
        );
        if limit >= counted {
            continue;
        }
        // Nobody may be sold what could still be held.
        let used = used.as_ref().map_or(counted, |used| used[i]);
        let over = used.min(counted).saturating_sub(limit);
        if over == 0 {
            continue;
        }
        if limit < old.memory_limit_bytes && !order.force {
            restore();
            let [used, limit] = format_compared(used, limit);
            let uses = match region {
                Some(_) => format!("uses {used} of GPU {uuid}"),
                None => {
                    format!("has pages that cannot be read now, so its use of {uuid} is unknown")
                }
            };
            return Err(SteerError::Refused(format!(
                "{} {uses}, more than {limit}; lower its limit to no less than that, have it let go of \
                 memory, or add --force: then it keeps what it has, and everything new is refused \
                 until it fits",
                describe(record),
            )));
        }
        notes.push(format!(
            "it holds {} more of GPU {uuid} than its limit: that stays its own, and every new request \
             is refused, until it has let go of it",
            format_bytes(over)
        ));
        owed.insert(uuid.clone(), over);
    }
    let in_use = (0..grants.len()).map(|i| used.as_ref().map(|used| used[i])).collect();
    Ok((owed, in_use))
}

/// Bytes charged and observed on each of an allocation's GPUs.
fn in_use(region: &Region, gpus: usize) -> Vec<u64> {
    let snapshot = region.recover_and_snapshot().snapshot;
    (0..gpus).map(|gpu| snapshot.charged(gpu).saturating_add(region.overhead(gpu))).collect()
}

impl Allocations {
    pub fn find(&self, target: &Target) -> Result<Arc<Record>, SteerError> {
        choose(&self.records(), target)
    }
}

/// All that an allocation is called: by each container that has it, by its claim, by its id.
fn called(record: &Record) -> impl Iterator<Item = Called<'_>> {
    let of = Called { id: record.id.as_str(), generation: record.generation, ..Called::default() };
    let holders = record.holders().map(move |Holder { namespace, pod, container }| Called {
        namespace,
        pod,
        container,
        ..of
    });
    let claim = record.origin.claim();
    let claim = claim.map(|claim| Called { namespace: &claim.namespace, claim: &claim.name, ..of });
    holders.chain(claim).chain([of])
}

fn choose(records: &[Arc<Record>], target: &Target) -> Result<Arc<Record>, SteerError> {
    let Target { name, namespace, container } = target;
    let is_so = |asked: &str, named: &str| asked.is_empty() || asked == named;
    let may_be = |one: &Called<'_>| {
        one.namespace.is_empty()
            || is_so(namespace, one.namespace) && is_so(container, one.container)
    };
    let all: Vec<_> = records.iter().flat_map(|record| called(record)).filter(may_be).collect();
    let found = match subject::find(name, &all, &[], "") {
        Ok(Meant::Allocations(found)) => found,
        Err(Unmeant::Several(several)) => return Err(SteerError::Invalid(several.to_string())),
        Ok(Meant::Gpu(_)) | Err(Unmeant::Nothing(_)) => {
            return Err(SteerError::NotFound(nothing(records, target)));
        }
    };
    let is_it = |record: &&Arc<Record>| found.iter().any(|key| key.id == record.id.as_str());
    let (live, parked): (Vec<_>, Vec<_>) =
        records.iter().filter(is_it).partition(|record| record.is_live());
    match (live.as_slice(), parked.as_slice()) {
        ([one], _) => Ok(Arc::clone(one)),
        ([], []) => Err(SteerError::NotFound(nothing(records, target))),
        ([], [record, ..]) => Err(SteerError::Refused(format!(
            "{} holds nothing any more: its replicas went to another allocation",
            describe(record)
        ))),
        (several, _) => Err(SteerError::Invalid(format!(
            "{name} may be any of {}; add --container or --namespace, or name the allocation",
            list(several)
        ))),
    }
}

/// Why nothing is called so, of the live allocations.
fn nothing(records: &[Arc<Record>], target: &Target) -> String {
    if AllocationId::parse(&target.name).is_some() {
        return format!("no allocation {}; `tessera status` lists what there is", target.name);
    }
    let live = records.iter().filter(|record| record.is_live());
    let (named, nameless): (Vec<_>, Vec<_>) = live.partition(|record| record.holder.is_some());
    let mut text = format!("no container of a pod {} holds a GPU on this node", target.name);
    if !named.is_empty() {
        text.push_str(&format!("; these do: {}", list(&named)));
    }
    match nameless.len() {
        0 => {}
        n => text.push_str(&format!(
            "; of {n} allocations kubelet has not said who holds them: name them by their ids, as \
             `tessera status` shows them"
        )),
    }
    text
}

fn list(records: &[&Arc<Record>]) -> String {
    room::list(&records.iter().map(|record| describe(record)).collect::<Vec<_>>())
}

fn describe(record: &Record) -> String {
    match &record.holder {
        Some(holder) => format!(
            "{}/{} container {} (allocation {})",
            holder.namespace, holder.pod, holder.container, record.id
        ),
        None => format!("allocation {}", record.id),
    }
}

#[cfg(test)]
mod select_tests {
    use super::*;
    use tessera_model::record::State;

    fn record(replica: &str, holder: Option<[&str; 3]>) -> Arc<Record> {
        let holder = holder.map(|[namespace, pod, container]| Holder {
            namespace: namespace.into(),
            pod: pod.into(),
            container: container.into(),
        });
        Arc::new(Record {
            resource: "r".into(),
            replicas: vec![replica.into()],
            state: State::Started,
            holder,
            ..Record::new(AllocationId::of("r", [replica]), 1, Vec::new())
        })
    }

    fn records() -> Vec<Arc<Record>> {
        vec![
            record("0", Some(["one", "llm", "main"])),
            record("1", Some(["one", "llm", "side"])),
            record("2", Some(["two", "llm", "main"])),
            record("3", Some(["two", "web", "main"])),
            record("4", None),
        ]
    }

    fn find(name: &str, namespace: &str, container: &str) -> Result<String, String> {
        let [name, namespace, container] = [name, namespace, container].map(str::to_owned);
        let found = choose(&records(), &Target { name, namespace, container });
        found.map(|one| one.replicas[0].clone()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_pod_is_named_as_exactly_as_it_must_be() {
        assert_eq!(find("web", "", ""), Ok("3".into()));
        assert_eq!(find("two/llm", "", ""), Ok("2".into()));
        assert_eq!(find("llm", "two", ""), Ok("2".into()));
        assert_eq!(find("one/llm", "", "side"), Ok("1".into()));
        let id = AllocationId::of("r", ["4"]).to_string();
        assert_eq!(find(&id, "one", ""), Ok("4".into()));
        assert_eq!(find(&id[..8], "", ""), Ok("4".into()), "as status shows it");
        assert!(find(&id[..3], "", "").is_err());
    }

    #[test]
    fn what_several_match_is_refused_with_their_names() {
        let error = find("llm", "", "").unwrap_err();
        for name in ["one/llm container main", "one/llm container side", "two/llm container main"] {
            assert!(error.contains(name), "{error}");
        }
        assert!(error.contains("--container or --namespace"), "{error}");
        assert!(!error.contains("web"), "{error}");
    }

    #[test]
    fn what_nothing_matches_is_refused_with_what_there_is() {
        let error = find("lllm", "", "").unwrap_err();
        assert!(error.contains("these do: one/llm container main"), "{error}");
        assert!(error.contains("of 1 allocations kubelet has not said"), "{error}");
        for (name, namespace) in [("three/llm", ""), ("one/llm", "two"), ("", "")] {
            let error = find(name, namespace, "").unwrap_err();
            assert!(error.starts_with("no container of a pod"), "{error}");
        }
        assert!(find(&"0".repeat(32), "", "").unwrap_err().starts_with("no allocation 000"));
    }
}
