//! Shares whose claim is gone although kubelet never unprepared it: kubelet lost its state, or was replaced.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_cluster::Failure;
use tessera_cluster::k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_cluster::resource::ClaimRef;
use tessera_model::allocation_id::AllocationId;
use tessera_model::origin::ClaimShare;
use tessera_model::record::Record;
use tessera_system::locks::lock;
use tracing::{info, warn};

use super::Inner;
use crate::{claims, names};

/// How often claims are looked at, and how long one has to be gone.
#[derive(Clone, Copy, Debug)]
pub struct Sweeping {
    /// Between two looks at all claims that hold something: one request each.
    pub interval: Duration,
    /// How long a share must have been without its claim, by two answers at least.
    pub grace: Duration,
}

impl Default for Sweeping {
    fn default() -> Self {
        Sweeping { interval: Duration::from_secs(600), grace: Duration::from_secs(60) }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kept {
    Share(AllocationId),
    /// The note that kubelet asked for it, by UID.
    Note(String),
}

/// What was found without a claim, and since when.
#[derive(Debug, Default)]
struct Absences(BTreeMap<Kept, Instant>);

impl Absences {
    /// Takes one answer for each of some: true where its claim is gone. Those that have been gone for `grace`.
    fn judge(
        &mut self,
        answers: &BTreeMap<Kept, bool>,
        live: &BTreeSet<Kept>,
        grace: Duration,
        now: Instant,
    ) -> Vec<Kept> {
        self.0.retain(|id, _| live.contains(id));
        let mut gone = Vec::new();
        for (id, is_gone) in answers {
            if !is_gone {
                self.0.remove(id);
                continue;
            }
            match self.0.get(id) {
                Some(since) if now.saturating_duration_since(*since) >= grace => {
                    gone.push(id.clone());
                }
                Some(_) => {}
                None => {
                    self.0.insert(id.clone(), now);
                }
            }
        }
        gone
    }
}

/// Whether nothing speaks for a share any more: its claim is gone, another has its name, or the claim is neither
/// reserved for anybody nor allocated as the share says.
fn is_gone(share: &ClaimShare, claim: Option<&ResourceClaim>) -> bool {
    let Some(claim) = claim.filter(|claim| claim.metadata.uid.as_ref() == Some(&share.uid)) else {
        return true;
    };
    let results = claims::allocated(claim).and_then(|allocated| allocated.results.as_deref());
    let results = results.unwrap_or_default();
    let has = |device: &str, share_id: Option<&str>| {
        results.iter().any(|result| {
            result.driver == names::DRIVER
                && result.request == share.request
                && result.pool == share.pool
                && result.device == device
                && result.share_id.as_deref() == share_id
        })
    };
    claims::reserved_for(claim).is_empty()
        && !share.results.iter().all(|held| has(&held.device, held.share_id.as_deref()))
}

/// Looks at intervals, sooner where a claim was refused for lack of room.
pub(super) async fn keep(inner: &Arc<Inner>, sweeping: Sweeping) {
    let mut absences = Absences::default();
    // What happened while no plugin ran is looked at first.
    let mut pause = sweeping.grace;
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = inner.suspicion.notified() => {}
        }
        sweep(inner, &mut absences, sweeping.grace).await;
        // A share that is suspected is looked at again as soon as its grace is over.
        pause = if absences.0.is_empty() { sweeping.interval } else { sweeping.grace };
    }
}

async fn sweep(inner: &Arc<Inner>, absences: &mut Absences, grace: Duration) {
    let (records, asked) = (inner.agent.claims(), inner.asked.all());
    let mut by_claim: BTreeMap<ClaimRef, Vec<&Record>> =
        asked.iter().map(|claim| (claim.clone(), Vec::new())).collect();
    for record in &records {
        let Some(share) = record.origin.claim() else { continue };
        let (namespace, name) = (share.namespace.clone(), share.name.clone());
        let claim = ClaimRef { namespace, name, uid: share.uid.clone() };
        by_claim.entry(claim).or_default().push(record);
    }
    let mut answers = BTreeMap::new();
    for (claim, records) in by_claim {
        let found = match inner.api.claim(&claim.namespace, &claim.name).await {
            Ok(found) => found,
            // One claim that cannot be read says nothing of the others.
            Err(error) if error.failure == Failure::Unreadable => {
                warn!(%error, "whether a claim is gone is not known");
                continue;
            }
            Err(error) => {
                warn!(%error, "claims that may be gone are looked for again later");
                break;
            }
        };
        for record in records {
            let Some(share) = record.origin.claim() else { continue };
            answers.insert(Kept::Share(record.id.clone()), is_gone(share, found.as_ref()));
        }
        let is_other = found.is_none_or(|found| found.metadata.uid.as_ref() != Some(&claim.uid));
        answers.insert(Kept::Note(claim.uid), is_other);
    }
    let shares = records.iter().map(|record| Kept::Share(record.id.clone()));
    let live = shares.chain(asked.into_iter().map(|claim| Kept::Note(claim.uid))).collect();
    let gone = absences.judge(&answers, &live, grace, Instant::now());
    if gone.is_empty() {
        return;
    }
    let inner = Arc::clone(inner);
    let release = move || {
        let _changing = lock(&inner.changing);
        let mut shares = Vec::new();
        for kept in gone {
            match kept {
                Kept::Share(id) => shares.push(id),
                Kept::Note(uid) => inner.asked.forget(&uid),
            }
        }
        if shares.is_empty() {
            return;
        }
        info!(
            shares = shares.len(),
            "claims are gone that kubelet did not unprepare; their shares end"
        );
        if let Err(error) = inner.agent.release(&shares) {
            warn!(%error, "shares of claims that are gone cannot be released yet");
        }
    };
    // A panic has been reported; the next round tries again.
    let _ = tokio::task::spawn_blocking(release).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{claim, claim_record, share};

    #[test]
    fn a_share_is_gone_when_nothing_speaks_for_it() {
        let record = claim_record("u", "gpu", &[("gpu-a", Some("s"))]);
        let is_gone =
            |claim: Option<&ResourceClaim>| is_gone(record.origin.claim().unwrap(), claim);
        // Of a claim with this UID and this share that is reserved for pods or not.
        let of = |uid: &str, share_id: &str, is_reserved: bool| {
            let result = share("gpu", "gpu-a", share_id, "1Gi", "1");
            let mut claim = claim("claim-u", uid, vec![result]);
            let status = claim.status.as_mut().unwrap();
            if !is_reserved {
                status.reserved_for = None;
            }
            claim
        };
        assert!(is_gone(None));
        assert!(is_gone(Some(&of("v", "s", false))));
        // Allocated: kubelet may come back to it.
        assert!(!is_gone(Some(&of("u", "s", false))));
        assert!(is_gone(Some(&of("u", "t", false))));
        assert!(!is_gone(Some(&of("u", "t", true))));
        let mut without = of("u", "s", false);
        without.status.as_mut().unwrap().allocation = None;
        assert!(is_gone(Some(&without)));
    }

    #[test]
    fn nothing_is_released_before_its_grace_is_over_or_on_one_answer() {
        let mut absences = Absences::default();
        let (one, two) = (Kept::Share(AllocationId::of("a", ["1"])), Kept::Note("u-2".to_owned()));
        let live: BTreeSet<_> = [one.clone(), two.clone()].into();
        let answers = |one_gone, two_gone| -> BTreeMap<_, _> {
            [(one.clone(), one_gone), (two.clone(), two_gone)].into()
        };
        let grace = Duration::from_secs(60);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(absences.judge(&answers(true, true), &live, grace, at(0)).is_empty());
        assert!(absences.judge(&answers(true, true), &live, grace, at(59)).is_empty());
        // The second is back; the API server says nothing for a while.
        assert!(absences.judge(&answers(true, false), &live, grace, at(59)).is_empty());
        assert!(absences.judge(&BTreeMap::new(), &live, grace, at(200)).is_empty());
        let gone = absences.judge(&answers(true, true), &live, grace, at(201));
        assert_eq!(gone, std::slice::from_ref(&one));
        // Released in between.
        let live: BTreeSet<_> = [two.clone()].into();
        let gone = absences.judge(&answers(true, true), &live, grace, at(262));
        assert_eq!(gone, [two]);
    }
}
