//! Which claim's status is written next. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tessera_cluster::error::{ApiError, Retry};
use tessera_cluster::k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tessera_cluster::k8s_openapi::jiff::Timestamp;
use tessera_cluster::resource::{ClaimRef, DeviceStatus};

/// Pause after a failure that passes by itself; it doubles …
const SHORTEST: Duration = Duration::from_secs(1);
/// … up to this.
const LONGEST: Duration = Duration::from_secs(60);
/// Pause after a failure that a person must mend.
const LATER: Duration = Duration::from_secs(300);

/// What is to be written, and what was.
#[derive(Debug, Default)]
pub struct Reports {
    wanted: BTreeMap<ClaimRef, Vec<DeviceStatus>>,
    /// As wanted at its last write, the server's answer apart.
    written: BTreeMap<ClaimRef, Vec<DeviceStatus>>,
    failures: u32,
    pause_until: Option<Instant>,
}

impl Reports {
    /// From now on this is what claims should say. `at`: when conditions that are others now have changed.
    pub fn want(&mut self, mut wanted: BTreeMap<ClaimRef, Vec<DeviceStatus>>, at: Timestamp) {
        for (claim, devices) in &mut wanted {
            let before = self.wanted.get(claim);
            for device in devices {
                keep_time(device, before.into_iter().flatten(), at);
            }
        }
        // A claim that is unprepared has no status to write: it goes with the allocation.
        self.written.retain(|claim, _| wanted.contains_key(claim));
        self.wanted = wanted;
    }

    /// The next claim to write, or how long to wait; neither where all is written.
    ///
    /// # Errors
    /// How long to wait.
    pub fn next(&self, now: Instant) -> Result<Option<(&ClaimRef, &[DeviceStatus])>, Duration> {
        let mut due =
            self.wanted.iter().filter(|(claim, devices)| self.written.get(claim) != Some(devices));
        let Some((claim, devices)) = due.next() else { return Ok(None) };
        let left = self.pause_until.and_then(|until| until.checked_duration_since(now));
        match left.filter(|left| !left.is_zero()) {
            Some(left) => Err(left),
            None => Ok(Some((claim, devices))),
        }
    }

    /// What came of writing `devices`. Whether that is a failure to speak of.
    pub fn done(
        &mut self,
        claim: &ClaimRef,
        devices: Vec<DeviceStatus>,
        answer: &Result<(), ApiError>,
        now: Instant,
    ) -> bool {
        let pause = match answer {
            // A claim that is gone, or not allocated any more, needs none.
            Ok(()) | Err(ApiError::NotFound { .. }) => None,
            // The same will never be taken: the next change is tried again.
            Err(error) if error.retry() == Retry::Never => None,
            Err(error) if error.retry() == Retry::Later => Some(LATER),
            Err(_) => Some(SHORTEST.saturating_mul(1 << self.failures.min(10)).min(LONGEST)),
        };
        self.pause_until = pause.map(|pause| now + pause);
        match pause {
            Some(_) => self.failures = self.failures.saturating_add(1),
            None => {
                self.failures = 0;
                self.written.insert(claim.clone(), devices);
            }
        }
        !matches!(answer, Ok(()) | Err(ApiError::NotFound { .. })) && self.failures <= 1
    }
}

/// Conditions say since when they are as they are.
fn keep_time<'d>(
    device: &mut DeviceStatus,
    before: impl Iterator<Item = &'d DeviceStatus>,
    at: Timestamp,
) {
    let mut same = before.filter(|other| {
        (&other.pool, &other.device, &other.share_id)
            == (&device.pool, &device.device, &device.share_id)
    });
    let Some(before) = same.next() else { return };
    for condition in &mut device.conditions {
        let was = before.conditions.iter().find(|was| was.type_ == condition.type_);
        if let Some(was) = was {
            condition.last_transition_time = match was.status == condition.status {
                true => was.last_transition_time.clone(),
                false => Time(Timestamp::from_second(at.as_second()).unwrap_or(at)),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tessera_cluster::error::{Call, Kind, Verb};

    use super::super::of;
    use super::super::tests::record;
    use super::*;

    fn wanted(mib: u64, sick: Option<&str>) -> BTreeMap<ClaimRef, Vec<DeviceStatus>> {
        let records = [
            record("a", "gpu", &["gpu-a"], &[("GPU-a", mib, 100)]),
            record("b", "gpu", &["gpu-b"], &[("GPU-b", 1024, 100)]),
        ];
        let sick = sick.map(|why| ("GPU-a".to_owned(), why.to_owned())).into_iter().collect();
        of(&records.map(Arc::new), &sick)
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// Writes all that is due; the names of the claims.
    fn write(reports: &mut Reports, now: Instant) -> Vec<String> {
        let mut names = Vec::new();
        while let Ok(Some((claim, devices))) = reports.next(now) {
            let (claim, devices) = (claim.clone(), devices.to_vec());
            names.push(claim.name.clone());
            assert!(!reports.done(&claim, devices, &Ok(()), now));
        }
        names
    }

    #[test]
    fn each_claim_is_written_once_and_again_when_it_changes() {
        let (mut reports, now) = (Reports::default(), Instant::now());
        reports.want(wanted(1024, None), at(10));
        assert_eq!(write(&mut reports, now), ["a", "b"]);
        reports.want(wanted(1024, None), at(20));
        assert_eq!(write(&mut reports, now), [""; 0]);
        reports.want(wanted(2048, None), at(30));
        assert_eq!(write(&mut reports, now), ["a"]);
        reports.want(BTreeMap::new(), at(40));
        assert_eq!(write(&mut reports, now), [""; 0]);
        // Prepared again.
        reports.want(wanted(2048, None), at(50));
        assert_eq!(write(&mut reports, now), ["a", "b"]);
    }

    #[test]
    fn a_condition_keeps_its_time_while_its_status_is_the_same() {
        let mut reports = Reports::default();
        let time = |reports: &Reports| {
            let first = &reports.wanted.first_key_value().unwrap().1[0].conditions[0];
            (first.status.clone(), first.last_transition_time.0.as_second())
        };
        reports.want(wanted(1024, None), at(10));
        let begin = time(&reports).1;
        reports.want(wanted(2048, None), at(20));
        assert_eq!(time(&reports), ("True".to_owned(), begin));
        reports.want(wanted(2048, Some("XID 79")), at(30));
        assert_eq!(time(&reports), ("False".to_owned(), 30));
        reports.want(wanted(2048, Some("XID 80")), at(40));
        assert_eq!(time(&reports), ("False".to_owned(), 30));
        reports.want(wanted(2048, None), at(50));
        assert_eq!(time(&reports), ("True".to_owned(), 50));
    }

    #[test]
    fn a_failure_is_said_once_and_waited_out() {
        let (mut reports, now) = (Reports::default(), Instant::now());
        reports.want(wanted(1024, None), at(10));
        let call = Call::of(Verb::Patch, Kind::ClaimStatus, "team", "a");
        let away = || Err(ApiError::Unreachable { call: call.clone(), reason: String::new() });
        let fail = |reports: &mut Reports, answer: Result<(), ApiError>, now| {
            let (claim, devices) = reports.next(now).unwrap().unwrap();
            let (claim, devices) = (claim.clone(), devices.to_vec());
            reports.done(&claim, devices, &answer, now)
        };
        assert!(fail(&mut reports, away(), now));
        assert_eq!(reports.next(now), Err(SHORTEST));
        assert!(!fail(&mut reports, away(), now + SHORTEST));
        assert_eq!(reports.next(now + SHORTEST), Err(SHORTEST * 2));
        let now = now + LATER;
        let forbidden = Err(ApiError::Forbidden { call: call.clone(), message: String::new() });
        fail(&mut reports, forbidden, now);
        assert_eq!(reports.next(now), Err(LATER));
        // Gone in between: the other one is next.
        let now = now + LATER;
        let gone = Err(ApiError::NotFound { call: call.clone(), message: String::new() });
        assert!(!fail(&mut reports, gone, now));
        let invalid =
            Err(ApiError::Invalid { call: call.clone(), field: None, message: String::new() });
        assert!(fail(&mut reports, invalid, now));
        assert_eq!(reports.next(now), Ok(None));
    }
}
