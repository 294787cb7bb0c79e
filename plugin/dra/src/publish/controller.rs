//! The publication as a state machine: what is wanted, what there is, the time; then the next step. Pure.
//!
//! **Nothing unshared stays.** An API server without consumable capacity (KEP 5075, on by default since Kubernetes
//! 1.36) drops what makes a device shareable, and a scheduler would give the whole GPU to one pod. The answer to each
//! write shows what the server kept: a slice with such a device is removed before anything else, and nothing is
//! published until other devices are wanted or [`REFUSED_FOR`] is over. A claim that was allocated in between is
//! refused when kubelet has it prepared.
//!
//! **Two instances** during an update of the driver publish the same and find it there; of the times at which they
//! noticed a taint, both take the earlier. Where they differ otherwise (in their configuration), each writes when the
//! other has; the pace bounds that until one ends.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use strum::IntoStaticStr;
use tessera_cluster::k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use tessera_cluster::k8s_openapi::jiff::Timestamp;
use tessera_cluster::resource::{ResourceClient, SliceEvent};
use tessera_cluster::{ApiError, Failure};

use super::device::Since;
use super::offer::Offer;
use super::slices::{Node, Standing, cut};

/// How long devices that the server refused, or kept unshared, are not sent again, unless others are wanted.
const REFUSED_FOR: Duration = Duration::from_secs(600);
const CANNOT_SHARE: &str = "needs Kubernetes 1.36 (DRAConsumableCapacity): the API server dropped \
    allowMultipleAllocations or a requestPolicy, so the slice was removed again";

#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    NodeUid,
    List,
    Create(Box<ResourceSlice>),
    /// Replace a slice, of the same name and resource version.
    Update(Box<ResourceSlice>),
    Delete(String),
    /// Nothing until something changes, or for so long.
    Wait(Option<Duration>),
}

#[derive(Clone, Debug)]
pub enum Answer {
    NodeUid(String),
    /// To [`Step::List`], with the version from which a watch goes on.
    Listed(Vec<ResourceSlice>, String),
    /// To [`Step::Create`] and [`Step::Update`]: what it kept.
    Kept(Box<ResourceSlice>),
    Deleted,
}

impl Step {
    pub async fn take(&self, api: &ResourceClient) -> Result<Answer, ApiError> {
        match self {
            Step::NodeUid => api.node_uid().await.map(Answer::NodeUid),
            Step::List => {
                api.own_slices().await.map(|(slices, version)| Answer::Listed(slices, version))
            }
            Step::Create(slice) => api.create_slice(slice).await.map(Box::new).map(Answer::Kept),
            Step::Update(slice) => api.update_slice(slice).await.map(Box::new).map(Answer::Kept),
            Step::Delete(name) => api.delete_slice(name).await.map(|()| Answer::Deleted),
            Step::Wait(_) => Ok(Answer::Deleted),
        }
    }
}

#[derive(Debug)]
pub struct Controller {
    name: String,
    node: Option<Node>,
    offer: Option<Offer>,
    since: Since,
    /// What there is, by name; `None` before the first list.
    observed: Option<BTreeMap<String, ResourceSlice>>,
    /// What there is may be something else.
    pub(super) stale: bool,
    /// What was written under a name, and the resource version that it got.
    written: BTreeMap<String, (String, ResourceSlice)>,
    /// The devices that are being published, and under which generation.
    aim: Option<(Vec<Device>, i64)>,
    /// Devices that the server refused, when, and in which words.
    refused: Option<(Vec<Device>, Instant, String)>,
    pace: Pace,
    /// Whether a write is due, now or after a pause.
    is_due: bool,
    pub(super) status: Status,
}

impl Controller {
    pub fn new(node: &str) -> Self {
        Controller {
            name: node.to_owned(),
            node: None,
            offer: None,
            since: Since::default(),
            observed: None,
            stale: true,
            written: BTreeMap::new(),
            aim: None,
            refused: None,
            pace: Pace::default(),
            is_due: true,
            status: Status::default(),
        }
    }

    /// From now on this is to be published. `at`: when its new taints were added.
    pub fn want(&mut self, mut offer: Offer, at: Timestamp) {
        self.since.stamp(&mut offer.devices, at);
        self.status.problems.clone_from(&offer.problems);
        self.offer = Some(offer);
    }

    pub fn heard(&mut self, event: &SliceEvent, now: Instant) {
        match event {
            SliceEvent::Changed { name, resource_version } => {
                let own = self.written.get(name).map(|(version, _)| version);
                self.stale |= own != Some(resource_version);
            }
            SliceEvent::Removed { name } => {
                // One that this instance removed is not known any more.
                let is_known = self.observed.as_ref().is_some_and(|all| all.contains_key(name));
                self.stale |= is_known;
                self.note_wipe(is_known, now);
            }
        }
    }

    pub fn next(&mut self, now: Instant) -> Step {
        let step = self.choose(now);
        self.status.state = match &self.status.error {
            Some(_) => State::Failing,
            None if self.observed.is_none() => State::Starting,
            None if self.is_due => State::Writing,
            None => State::Published,
        };
        step
    }

    fn choose(&mut self, now: Instant) -> Step {
        if self.offer.is_none() {
            return Step::Wait(None);
        }
        if let Some(pause) = self.pace.before_asking(now) {
            return Step::Wait(Some(pause));
        }
        let Some(node) = self.node.clone() else { return Step::NodeUid };
        if self.stale || self.observed.is_none() {
            return Step::List;
        }
        if let Some(name) = self.unshared() {
            return Step::Delete(name);
        }
        let write = self.write(&node, now);
        self.is_due = write.is_some();
        let Some(write) = write else {
            let refused = self.refused_until(now);
            // Said for as long as it is wanted, whatever else the server answers meanwhile.
            self.status.error = refused.as_ref().map(|(_, why)| why.clone());
            return Step::Wait(refused.map(|(until, _)| until.saturating_duration_since(now)));
        };
        match self.pace.before_writing(now) {
            Some(pause) => Step::Wait(Some(pause)),
            None => write,
        }
    }

    pub fn done(&mut self, step: &Step, answer: Result<Answer, ApiError>, now: Instant) {
        if matches!(step, Step::Create(_) | Step::Update(_) | Step::Delete(_)) {
            self.pace.wrote(now);
            self.status.writes += 1;
        }
        match answer {
            Ok(answer) => {
                self.pace.succeeded();
                self.status.error = None;
                self.take(step, answer, now);
            }
            Err(error) => self.fail(step, &error, now),
        }
    }

    fn take(&mut self, step: &Step, answer: Answer, now: Instant) {
        match (step, answer) {
            (_, Answer::NodeUid(uid)) => self.node = Some(Node { name: self.name.clone(), uid }),
            (_, Answer::Listed(slices, _)) => self.take_list(slices, now),
            (Step::Create(sent) | Step::Update(sent), Answer::Kept(kept)) => {
                self.take_kept(sent, *kept, now)
            }
            (Step::Delete(name), _) => {
                self.written.remove(name);
                self.observed.iter_mut().for_each(|all| drop(all.remove(name)));
            }
            _ => {}
        }
    }

    fn take_list(&mut self, slices: Vec<ResourceSlice>, now: Instant) {
        // Each time: another instance may have noticed before this one, and both would correct each other for ever.
        self.since.learn(&slices);
        if let Some(offer) = self.offer.take() {
            // Every taint of it has its time by now.
            self.want(offer, Timestamp::MAX);
        }
        let name = |slice: &ResourceSlice| slice.metadata.name.clone().unwrap_or_default();
        let slices: BTreeMap<_, _> =
            slices.into_iter().map(|slice| (name(&slice), slice)).collect();
        let gone = self.observed.iter().flatten().any(|(name, _)| !slices.contains_key(name));
        // A watch that was interrupted has not reported it.
        self.note_wipe(gone, now);
        self.written.retain(|name, _| slices.contains_key(name));
        self.observed = Some(slices);
        self.stale = false;
    }

    fn take_kept(&mut self, sent: &ResourceSlice, kept: ResourceSlice, now: Instant) {
        if !devices(&kept).all(is_shared) {
            self.refused = Some((self.wanted().to_vec(), now, CANNOT_SHARE.to_owned()));
        }
        let name = kept.metadata.name.clone().unwrap_or_default();
        let version = kept.metadata.resource_version.clone().unwrap_or_default();
        self.written.insert(name.clone(), (version, sent.clone()));
        self.observed.get_or_insert_default().insert(name, kept);
    }

    fn fail(&mut self, step: &Step, error: &ApiError, now: Instant) {
        self.pace.failed(error, now);
        let is_race = matches!(error.failure, Failure::Conflict | Failure::NotFound);
        self.stale |= !matches!(step, Step::NodeUid);
        match error.failure {
            Failure::Invalid(_) => {
                self.refused = Some((self.wanted().to_vec(), now, error.to_string()))
            }
            // Of a node that was made again.
            Failure::NotFound if *step == Step::NodeUid => {}
            _ if is_race => return,
            _ => {}
        }
        self.status.error = Some(error.to_string());
    }

    fn note_wipe(&mut self, is_wipe: bool, now: Instant) {
        if is_wipe && self.pace.wiped(now) {
            self.status.wipes += 1;
        }
    }

    /// The write that is due, whether or not it may be made now.
    fn write(&mut self, node: &Node, now: Instant) -> Option<Step> {
        let observed = self.observed.as_ref()?;
        let devices = self.wanted().to_vec();
        if self.refused_until(now).is_some() {
            return None;
        }
        let parts = cut(&devices).len();
        let standing = Standing::of(observed.values(), node, parts);
        let is_in_sync = |there: &ResourceSlice, wanted: &ResourceSlice| {
            there.spec == wanted.spec || self.is_what_was_written(there, wanted)
        };
        let aimed = self.aim.as_ref().filter(|(aimed, generation)| {
            *aimed == devices && *generation >= standing.generation()
        });
        let generation = aimed.map_or_else(
            || standing.next_generation(node, &devices, &is_in_sync),
            |(_, generation)| *generation,
        );
        let write = standing.write(node, &devices, generation, &is_in_sync);
        (self.status.devices, self.status.slices) = (devices.len(), parts);
        self.status.generation = generation;
        self.aim = Some((devices, generation));
        write
    }

    /// Until when the server is not asked again for what it has refused, and its words; `None` where something else
    /// is wanted.
    fn refused_until(&self, now: Instant) -> Option<(Instant, String)> {
        let (refused, at, why) = self.refused.as_ref()?;
        let until = *at + REFUSED_FOR;
        (now < until && *refused == self.wanted()).then(|| (until, why.clone()))
    }

    fn wanted(&self) -> &[Device] {
        self.offer.as_ref().map_or(&[], |offer| &offer.devices)
    }

    /// A slice with a GPU that would go to one pod as a whole.
    fn unshared(&self) -> Option<String> {
        let mut all = self.observed.iter().flatten();
        let found = all.find(|(_, slice)| !devices(slice).all(is_shared));
        found.map(|(name, _)| name.clone())
    }

    /// Whether the server has kept of `wanted` what it can, and nobody has changed it since.
    fn is_what_was_written(&self, there: &ResourceSlice, wanted: &ResourceSlice) -> bool {
        let name = there.metadata.name.as_deref().unwrap_or_default();
        self.written.get(name).is_some_and(|(version, sent)| {
            there.metadata.resource_version.as_ref() == Some(version) && sent.spec == wanted.spec
        })
    }
}

/// Whether a device can be shared as the driver means it.
fn is_shared(device: &Device) -> bool {
    let mut capacities = device.capacity.iter().flat_map(|all| all.values());
    device.allow_multiple_allocations == Some(true)
        && capacities.all(|capacity| capacity.request_policy.is_some())
}

fn devices(slice: &ResourceSlice) -> impl Iterator<Item = &Device> {
    slice.spec.devices.iter().flatten()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum State {
    /// Nothing is known of the API server yet.
    #[default]
    Starting,
    Writing,
    Published,
    /// It does not answer, or refuses; [`Status::error`] says why.
    Failing,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub state: State,
    pub devices: usize,
    pub slices: usize,
    pub generation: i64,
    pub writes: u64,
    /// How often another removed slices, kubelet at its start for instance.
    pub wipes: u64,
    pub problems: Vec<String>,
    pub error: Option<String>,
}

impl Status {
    /// What a person should know, a sentence each; empty when all is well.
    pub fn sentences(&self) -> Vec<String> {
        let error = self.error.iter();
        let error =
            error.map(|error| format!("the ResourceSlices are not as they should be: {error}"));
        error.chain(self.problems.iter().cloned()).collect()
    }
}

/// Writes that may follow each other at once.
const BURST: u32 = 10;
/// Then one in this time.
const REFILL: Duration = Duration::from_millis(500);
/// Pause after a first failure; it doubles …
const SHORTEST: Duration = Duration::from_millis(250);
/// … up to this.
const LONGEST: Duration = Duration::from_secs(30);
/// Pause after slices were removed by another; it doubles with each time …
const WIPED: Duration = Duration::from_secs(1);
/// … that comes within this of the one before.
const WIPED_WITHIN: Duration = Duration::from_secs(60);

/// How fast writes follow each other, and how long a failure is waited out.
#[derive(Clone, Debug, Default)]
struct Pace {
    /// Writes in advance, and since when that counts.
    spent: u32,
    refilled: Option<Instant>,
    failures: u32,
    /// Nothing is asked before.
    asks_at: Option<Instant>,
    wipes: u32,
    wiped: Option<Instant>,
    /// Nothing is made before.
    makes_at: Option<Instant>,
}

impl Pace {
    fn before_asking(&self, now: Instant) -> Option<Duration> {
        left(self.asks_at, now)
    }

    fn before_writing(&self, now: Instant) -> Option<Duration> {
        let rate = match (self.spent >= BURST, self.refilled) {
            (true, Some(then)) => left(Some(then + REFILL), now),
            _ => None,
        };
        rate.max(left(self.makes_at, now))
    }

    fn wrote(&mut self, now: Instant) {
        let since = *self.refilled.get_or_insert(now);
        let back = now.saturating_duration_since(since).as_millis() / REFILL.as_millis();
        let back = u32::try_from(back).unwrap_or(u32::MAX);
        if back > 0 {
            self.refilled = Some(now);
        }
        self.spent = self.spent.saturating_sub(back).min(BURST) + 1;
    }

    fn succeeded(&mut self) {
        (self.failures, self.asks_at) = (0, None);
    }

    fn failed(&mut self, error: &ApiError, now: Instant) {
        let pause = SHORTEST.saturating_mul(1 << self.failures.min(10)).min(LONGEST);
        let asked = match error.failure {
            Failure::Busy { after, .. } => after.unwrap_or_default().min(LONGEST),
            _ => Duration::ZERO,
        };
        self.failures = self.failures.saturating_add(1);
        self.asks_at = Some(now + pause.max(asked));
    }

    /// Somebody removed slices. Several removals in one pause are one.
    fn wiped(&mut self, now: Instant) -> bool {
        if left(self.makes_at, now).is_some() {
            return false;
        }
        let again =
            self.wiped.is_some_and(|then| now.saturating_duration_since(then) < WIPED_WITHIN);
        self.wipes = if again { self.wipes.saturating_add(1) } else { 0 };
        self.wiped = Some(now);
        self.makes_at = Some(now + WIPED.saturating_mul(1 << self.wipes.min(10)).min(LONGEST));
        true
    }
}

fn left(until: Option<Instant>, now: Instant) -> Option<Duration> {
    until?.checked_duration_since(now).filter(|left| !left.is_zero())
}

#[cfg(test)]
mod tests;
