//! Arrays and mipmapped arrays, held to the quota by the driver's own size: CUDA Driver API, "Memory
//! Management".

use crate::{OUT_OF_MEMORY, SUCCESS, held};
use tessera_harness::{Conversation, MIB};
use tessera_region::layout::Kind;

const UINT8: u32 = 0x01;
const FLOAT: u32 = 0x20;

/// The page footprint of what the driver says that such an array needs.
fn footprint(tenant: &mut Conversation, of: &str) -> u64 {
    let needs = tenant.must(&format!("needs {of}"));
    let step = if needs <= MIB { 512 } else { 2 * MIB };
    needs.next_multiple_of(step)
}

#[test]
fn every_form_is_charged_what_the_driver_says_until_it_is_destroyed() {
    let (_sim, pages, mut tenant) = held("vmm", 256 * MIB);
    for (make, needs, end) in [
        (format!("array 1000 1000 {FLOAT} 4"), format!("1000 1000 0 {FLOAT} 4 0 0"), "unarray"),
        (format!("array1 1000 1000 {FLOAT} 1"), format!("1000 1000 0 {FLOAT} 1 0 0"), "unarray"),
        (format!("array 5000 0 {UINT8} 1"), format!("5000 0 0 {UINT8} 1 0 0"), "unarray"),
        (
            format!("array3 100 100 100 {FLOAT} 2 0"),
            format!("100 100 100 {FLOAT} 2 0 0"),
            "unarray",
        ),
        (format!("array31 64 64 6 {FLOAT} 1 4"), format!("64 64 6 {FLOAT} 1 4 0"), "unarray"),
        (format!("mipmap 512 512 0 {FLOAT} 4 0 5"), format!("512 512 0 {FLOAT} 4 0 5"), "unmipmap"),
        (format!("mipmap 64 64 9 {FLOAT} 4 1 3"), format!("64 64 9 {FLOAT} 4 1 3"), "unmipmap"),
    ] {
        let expected = footprint(&mut tenant, &needs);
        for round in 0..2 {
            let array = tenant.must(&make);
            assert_eq!(pages.charged(0), expected, "{make}, round {round}");
            tenant.must(&format!("{end} {array}"));
            assert_eq!(pages.charged(0), 0, "{make}");
        }
    }
    assert_eq!(pages.snapshot().slots[0].kinds[Kind::Array as usize], 0);
}

#[test]
fn what_does_not_fit_is_refused_and_what_the_driver_rejects_charges_nothing() {
    let (_sim, pages, mut tenant) = held("vmm", 64 * MIB);
    let mut arrays = Vec::new();
    // 16 MiB of texels each.
    let refused = loop {
        let reply = tenant.ask(&format!("array 1024 1024 {FLOAT} 4"));
        if reply.result != SUCCESS {
            break reply.result;
        }
        arrays.push(reply.ok());
    };
    assert_eq!((refused, arrays.len()), (OUT_OF_MEMORY, 4));
    for array in arrays {
        tenant.must(&format!("unarray {array}"));
    }
    for bad in [
        "array 0 0 1 1".to_owned(),
        "array 16 16 1 3".to_owned(),
        format!("array 18446744073709551615 18446744073709551615 {FLOAT} 4"),
        format!("array3 4294967296 4294967296 4294967296 {FLOAT} 4 0"),
        "unarray 0".to_owned(),
    ] {
        assert_ne!(tenant.ask(&bad).result, SUCCESS, "{bad}");
        assert_eq!(pages.charged(0), 0, "{bad}");
    }
}

/// "Destroys and cleans up all resources associated with the context. These resources include CUDA
/// types […] CUarray, CUmipmappedArray" (`cuCtxDestroy`).
#[test]
fn a_contexts_end_gives_its_arrays_back() {
    let (_sim, pages, mut tenant) = held("vmm", 64 * MIB);
    let context = tenant.must("ctx 0");
    tenant.must(&format!("array 1024 1024 {FLOAT} 1"));
    tenant.must(&format!("mipmap 256 256 0 {FLOAT} 4 0 4"));
    assert!(pages.charged(0) > 4 * MIB);
    tenant.must(&format!("destroy {context}"));
    assert_eq!(pages.charged(0), 0);
    tenant.must("retain 0");
    tenant.must(&format!("array 1024 1024 {FLOAT} 1"));
    tenant.must("reset 0");
    assert_eq!(pages.charged(0), 0);
}

/// With `CUDA_ARRAY3D_DEFERRED_MAPPING` or `CUDA_ARRAY3D_SPARSE` memory comes with
/// `cuMemMapArrayAsync`, from `cuMemCreate`.
#[test]
fn arrays_whose_memory_comes_later_are_charged_nothing() {
    let (_sim, pages, mut tenant) = held("vmm", MIB);
    let array = tenant.must(&format!("array3 2048 2048 0 {FLOAT} 4 128"));
    assert_eq!(pages.charged(0), 0);
    tenant.must(&format!("unarray {array}"));
    assert_eq!(pages.charged(0), 0);
}
