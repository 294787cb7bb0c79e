//! `cudarc` as a tenant, run by `tests/suites/shim/clients.rs`: memory to the limit and back, copies, launches,
//! events, on the primary and on a context of its own. Prints `done`.
//!
//! Arguments: the quota in bytes, or `bare`; then the UUIDs of the machine's GPUs.

use cudarc::driver::sys::{CUevent_flags, cudaError_enum};
use cudarc::driver::{CudaContext, DriverError, LaunchConfig, PushKernelArg, result};
use cudarc::nvrtc::Ptx;
use tessera_harness::MIB;

const PTX: &str = ".version 7.0\n.target sm_52\n.address_size 64\n\
                   .visible .entry scale(.param .u64 p, .param .f32 f)\n{\n\tret;\n}\n";

fn main() {
    let mut args = std::env::args().skip(1);
    let limit = args.next().expect("a limit or `bare`").parse::<usize>().ok();
    let uuids: Vec<String> = args.collect();
    let run = || -> Result<(), DriverError> {
        devices(&uuids)?;
        memory_to_the_limit(limit)?;
        copies()?;
        launches()?;
        a_context_of_its_own()
    };
    run().expect("a driver call that must succeed");
    println!("done");
}

fn devices(uuids: &[String]) -> Result<(), DriverError> {
    result::init()?;
    let count = usize::try_from(CudaContext::device_count()?).expect("not negative");
    assert_eq!(count, uuids.len());
    for (ordinal, expected) in uuids.iter().enumerate() {
        let bytes = CudaContext::new(ordinal)?.uuid()?.bytes;
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(format!("GPU{hex}"), expected.replace('-', ""));
    }
    Ok(())
}

fn memory_to_the_limit(limit: Option<usize>) -> Result<(), DriverError> {
    let ctx = CudaContext::new(0)?;
    let stream = ctx.default_stream();
    let (free, total) = ctx.mem_get_info()?;
    assert_eq!(total, ctx.total_mem()?);
    if let Some(limit) = limit {
        assert_eq!(total, limit);
    }
    let chunk = usize::try_from(64 * MIB).expect("64-bit");
    let mut held = Vec::new();
    let refused = loop {
        // cudarc takes stream-ordered allocations where the device has pools.
        // SAFETY: the bytes are never read.
        match unsafe { stream.alloc::<u8>(chunk) } {
            Ok(slice) => held.push(slice),
            Err(error) => break error,
        }
        assert!(held.len() * chunk <= free, "more was granted than was free");
    };
    assert_eq!(refused.0, cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY);
    assert_eq!(held.len(), free / chunk);
    drop(held);
    stream.synchronize()?;
    if limit.is_some() {
        // On the bare driver the pool may keep what it has reserved.
        assert_eq!(ctx.mem_get_info()?.0, free);
    }
    drop(stream.alloc_zeros::<u8>(chunk)?);
    Ok(())
}

fn copies() -> Result<(), DriverError> {
    let ctx = CudaContext::new(0)?;
    let stream = ctx.new_stream()?;
    let source: Vec<u32> = (0..1_000_003u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let first = stream.clone_htod(&source)?;
    let second = stream.clone_dtod(&first)?;
    drop(first);
    assert_eq!(stream.clone_dtoh(&second)?, source);
    Ok(())
}

fn launches() -> Result<(), DriverError> {
    let ctx = CudaContext::new(0)?;
    let stream = ctx.new_stream()?;
    let function = ctx.load_module(Ptx::from_src(PTX))?.load_function("scale")?;
    let mut data = stream.alloc_zeros::<f32>(4096)?;
    let timed = Some(CUevent_flags::CU_EVENT_DEFAULT);
    let before = stream.record_event(timed)?;
    let factor = 2.0f32;
    for _ in 0..50 {
        let mut launch = stream.launch_builder(&function);
        launch.arg(&mut data).arg(&factor);
        // SAFETY: the kernel takes a pointer and a float, as given, and accesses nothing.
        unsafe { launch.launch(LaunchConfig::for_num_elems(4096)) }?;
    }
    let after = stream.record_event(timed)?;
    after.synchronize()?;
    assert!(after.is_complete());
    assert!(before.elapsed_ms(&after)? > 0.0, "kernels take time");
    Ok(())
}

/// Made by the newest form of `cuCtxCreate` and destroyed, its memory with it. (Stream-ordered memory
/// would stay: it belongs to the device's pool.)
fn a_context_of_its_own() -> Result<(), DriverError> {
    let primary = CudaContext::new(0)?;
    // What was freed in stream order before goes back to the device at a synchronisation.
    primary.synchronize()?;
    let (free, _) = primary.mem_get_info()?;
    let own = CudaContext::new_non_primary(0, 0)?;
    own.bind_to_thread()?;
    // SAFETY: the address is never used; the context frees it.
    unsafe { result::malloc_sync(1 << 20) }?;
    assert!(own.mem_get_info()?.0 < free);
    own.synchronize()?;
    drop(own);
    primary.bind_to_thread()?;
    assert_eq!(primary.mem_get_info()?.0, free, "a destroyed context gives back all of its memory");
    Ok(())
}
