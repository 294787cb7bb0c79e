//! Several shares of one GPU.

use super::tests::{Allocation, process};
use super::*;
use crate::layout::QUOTA_FILE;
use crate::quota::Policy;
use crate::share::{NO_SHARE, TOO_MANY_SHARES};

const GPU: &str = "GPU-0";

fn take(account: &Account, bytes: u64) -> Result<(), Reason> {
    tests::take(account, 0, bytes)
}

#[test]
fn the_sum_is_there_to_its_last_byte_and_comes_back_in_any_order() {
    let (one, two) = (Allocation::of(&[(GPU, 1000)]), Allocation::of(&[(GPU, 500)]));
    let account = process(&[&one, &two]);
    assert_eq!((account.shares().gpu_count(), account.shares().memory_limit(0)), (1, 1500));
    take(&account, 1500).unwrap();
    assert_eq!((one.charged(), two.charged()), (1000, 500));
    assert_eq!(account.reserve(0, 1).unwrap_err().reason, Reason::OverQuota);
    account.release(0, 700, Kind::Plain);
    assert_eq!((one.charged(), two.charged()), (800, 0), "the last share is emptied first");
    take(&account, 600).unwrap();
    for _ in 0..14 {
        account.release(0, 100, Kind::Plain);
    }
    assert_eq!((one.charged(), two.charged()), (0, 0));
    assert_eq!((one.kinds(), two.kinds()), (0, 0));
}

#[test]
fn a_request_that_one_share_holds_is_charged_there() {
    let (one, two) = (Allocation::of(&[(GPU, 100)]), Allocation::of(&[(GPU, 1000)]));
    let account = process(&[&one, &two]);
    take(&account, 60).unwrap();
    take(&account, 60).unwrap();
    assert_eq!((one.charged(), two.charged()), (100, 20));
}

#[test]
fn limits_move_one_by_one() {
    let (one, two) = (Allocation::of(&[(GPU, 100)]), Allocation::of(&[(GPU, 100)]));
    let account = process(&[&one, &two]);
    take(&account, 150).unwrap();
    one.quota.set_memory_limit(0, 40);
    assert_eq!(account.shares().used(0), 90, "what one lacks is not taken from the other");
    assert_eq!((account.shares().room(0), account.shares().excess(0)), (50, 60));
    assert_eq!(take(&account, 51), Err(Reason::OverQuota));
    take(&account, 50).unwrap();
    two.quota.set_memory_limit(0, 1000);
    take(&account, 900).unwrap();
    assert_eq!(take(&account, 1), Err(Reason::OverQuota));
}

#[test]
fn what_is_owed_lies_where_there_is_room_first() {
    let (one, two) = (Allocation::of(&[(GPU, 100)]), Allocation::of(&[(GPU, 100)]));
    let account = process(&[&one, &two]);
    take(&account, 150).unwrap();
    account.owe(0, 70, Kind::Async);
    assert_eq!((one.charged(), two.charged()), (100, 120));
    assert_eq!(take(&account, 1), Err(Reason::OverQuota));
    account.release(0, 70, Kind::Async);
    account.release(0, 150, Kind::Plain);
    assert_eq!((one.charged(), two.charged(), one.kinds(), two.kinds()), (0, 0, 0, 0));
}

#[test]
fn gpus_are_those_of_all_shares_and_the_same_one_once() {
    let one = Allocation::of(&[("GPU-0", 10), ("GPU-1", 20)]);
    let two = Allocation::of(&[("GPU-2", 30), ("GPU-1", 40)]);
    let account = process(&[&one, &two]);
    let shares = account.shares();
    let seen = |gpu| (shares.uuid(gpu), shares.memory_limit(gpu), shares.parts(gpu).len());
    assert_eq!(shares.gpu_count(), 3);
    assert_eq!([0, 1, 2].map(seen), [("GPU-0", 10, 1), ("GPU-1", 60, 2), ("GPU-2", 30, 1)]);
    assert_eq!((shares.find("GPU-2"), shares.find("GPU-3")), (Some(2), None));
    account.reserve(1, 60).unwrap().commit(60, Kind::Plain).unwrap();
    assert_eq!(account.reserve(0, 11).unwrap_err().limit, 10);
    account.reserve(2, 30).unwrap().commit(30, Kind::Plain).unwrap();
    let [first, second] = [&one, &two].map(|allocation| allocation.seen().slots[0].charged);
    assert_eq!((first[..2].to_vec(), second[..2].to_vec()), (vec![0, 20], vec![30, 40]));
}

#[test]
fn what_no_process_can_have_together_is_refused() {
    assert_eq!(ShareSet::new(Vec::new()).unwrap_err(), NO_SHARE);
    let one = Allocation::of(&[(GPU, 10)]);
    let shares = |count| (0..count).map(|_| one.share()).collect();
    assert_eq!(ShareSet::new(shares(17)).unwrap_err(), TOO_MANY_SHARES);
    assert_eq!(ShareSet::new(shares(16)).unwrap().memory_limit(0), 160);
    let names: Vec<String> = (0..32).map(|at| format!("GPU-{at}")).collect();
    let gpus: Vec<_> = names.iter().map(|name| (name.as_str(), 10)).collect();
    let [low, high] = [&gpus[..16], &gpus[16..17]].map(Allocation::of);
    let set = ShareSet::new(vec![low.share(), high.share()]);
    assert_eq!(set.unwrap_err(), "its shares are of more than 16 GPUs");
    assert_eq!(ShareSet::new(vec![low.share(), low.share()]).unwrap().gpu_count(), 16);
}

#[test]
fn the_gate_is_that_of_the_first_share_whose_compute_is_limited() {
    let free = Allocation::of(&[(GPU, 10)]);
    let strict = Allocation::with(&[(GPU, 10)], Policy::Strict);
    let lead = |allocations: &[&Allocation]| process(allocations).shares().lead_index();
    assert_eq!(lead(&[&free, &free]), 0);
    assert_eq!(lead(&[&free, &strict, &strict]), 1);
    assert_eq!(lead(&[&strict, &free]), 0);
}

#[test]
fn without_a_slot_in_one_share_none_is_kept_in_another() {
    let (one, two) = (Allocation::of(&[(GPU, 10)]), Allocation::of(&[(GPU, 10)]));
    let all: Vec<Account> = (0..crate::layout::SLOTS).map(|_| process(&[&two])).collect();
    let shares = ShareSet::new(vec![one.share(), two.share()]).unwrap();
    let (shares, share, error) = Account::claim(shares).unwrap_err();
    assert_eq!(share, 1);
    assert!(error.to_string().contains("use CUDA already"), "{error:?}");
    assert_eq!(process(&[&one]).slot_index(), 0, "the first one's is free again");
    drop(all);
    assert!(Account::claim(shares).is_ok());
}

#[test]
fn what_the_dead_held_in_two_shares_comes_back_in_both() {
    let (one, two) = (Allocation::of(&[(GPU, 100)]), Allocation::of(&[(GPU, 100)]));
    let (dying, living) = (process(&[&one, &two]), process(&[&one, &two]));
    take(&dying, 150).unwrap();
    // A reservation dies with its process, too.
    std::mem::forget(dying.reserve(0, 50).unwrap());
    drop(dying);
    take(&living, 200).unwrap();
    assert_eq!((one.charged(), two.charged()), (100, 100));
}

#[test]
fn a_process_is_listed_once_with_all_it_holds() {
    let (one, two) = (Allocation::of(&[(GPU, 100)]), Allocation::of(&[(GPU, 100)]));
    let both = process(&[&one, &two]);
    take(&both, 150).unwrap();
    let mut holders = [(0, 0); crate::layout::SLOTS];
    assert_eq!(both.shares().holders(0, &mut holders), 1);
    assert_eq!(holders[0], (std::process::id(), 150));
}

#[test]
fn a_page_that_went_away_hurts_nobody_who_has_it() {
    let (one, two) = (Allocation::of(&[(GPU, 100)]), Allocation::of(&[(GPU, 100)]));
    let account = process(&[&one, &two]);
    std::fs::remove_file(one.dir.path().join(QUOTA_FILE)).unwrap();
    take(&account, 200).unwrap();
    assert_eq!(take(&account, 1), Err(Reason::OverQuota));
}
