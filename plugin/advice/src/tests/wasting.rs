//! What is held and not used.

use tessera_config::Advice;

use super::waste;
use crate::fixtures::{GIB, Hour, Limits, Made, busy};

const HALF: Limits = Limits { memory_bytes: 40 * GIB, cores_millis: 500, policy: "burst" };

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

#[test]
fn requested_minus_peak_is_waste_and_has_its_price() {
    let made = [Made::new().pod("chat-0", HALF, &[busy(20 << 10, 360.0, 360.0); 10])];
    let settings = Advice { price_millis_per_gpu_hour: 2000, ..Advice::default() };
    let waste = waste(&made, &settings);
    let team = &waste.namespaces[0];
    // Half a GPU for ten hours; a quarter of its memory used.
    assert!(near(team.asked_gpu_hours, 5.0) && near(team.used_gpu_hours, 2.5), "{team:?}");
    assert!(near(team.cost, 5.0), "{team:?}");
    let tenant = &team.tenants[0];
    assert_eq!((tenant.memory_limit_bytes, tenant.memory_peak_bytes), (40 * GIB, 20 * GIB));
    assert_eq!((tenant.cores_millis, tenant.wanted_millis), (500, 200));
    assert_eq!((tenant.idle, tenant.idle_seconds), (false, None));
    assert_eq!(waste.currency, "USD");
    let free = super::waste(&made, &Advice::default());
    assert!(near(free.namespaces[0].cost, 0.0));
}

#[test]
fn a_container_without_gpu_work_is_idle_whatever_it_holds() {
    let mut hours = vec![busy(40 << 10, 1800.0, 0.0); 5];
    hours.extend([Hour { peak_mib: 40 << 10, ..Hour::default() }; 10]);
    let made = [Made::new().pod("notebook", HALF, &hours)];
    let waste = waste(&made, &Advice::default());
    let tenant = &waste.namespaces[0].tenants[0];
    assert!(tenant.idle);
    assert_eq!(tenant.idle_seconds, Some(36_000.0));
    // The last ten hours.
    assert!(near(tenant.wasted_gpu_hours, 5.0), "{tenant:?}");
    // A single launch an hour is work.
    for hour in &mut hours {
        hour.launches = 1;
    }
    let made = [Made::new().pod("notebook", HALF, &hours)];
    let waste = super::waste(&made, &Advice::default());
    let tenant = &waste.namespaces[0].tenants[0];
    assert!(!tenant.idle && near(tenant.wasted_gpu_hours, 0.0), "{tenant:?}");
}

#[test]
fn a_short_pause_is_not_idle() {
    let mut hours = vec![busy(40 << 10, 1800.0, 0.0); 5];
    hours.extend([Hour { peak_mib: 40 << 10, ..Hour::default() }; 3]);
    let waste = waste(&[Made::new().pod("notebook", HALF, &hours)], &Advice::default());
    let tenant = &waste.namespaces[0].tenants[0];
    assert!(!tenant.idle && near(tenant.wasted_gpu_hours, 0.0), "{tenant:?}");
    assert_eq!(tenant.idle_seconds, Some(10_800.0));
}

#[test]
fn what_is_gone_is_counted_and_not_idle() {
    let mut made = Made::new();
    made.gone("chat-0", HALF, &[Hour::default(); 10]);
    let waste = waste(&[made], &Advice::default());
    let tenant = &waste.namespaces[0].tenants[0];
    assert!(!tenant.live && !tenant.idle && tenant.idle_seconds.is_none());
    assert!(near(tenant.wasted_gpu_hours, 5.0), "{tenant:?}");
}

#[test]
fn more_than_was_asked_at_one_time_makes_up_for_nothing_at_another() {
    let mut hours = vec![busy(8 << 10, 3600.0, 0.0); 10];
    hours.extend([busy(8 << 10, 360.0, 0.0); 10]);
    let waste = waste(&[Made::new().pod("chat-0", HALF, &hours)], &Advice::default());
    let team = &waste.namespaces[0];
    // Ten hours of all that it asked for, and ten of a tenth of the GPU.
    assert!(near(team.asked_gpu_hours, 10.0) && near(team.used_gpu_hours, 6.0), "{team:?}");
}
