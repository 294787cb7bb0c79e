//! Modules, libraries, functions: CUDA Driver API, "Module Management", "Library Management",
//! "Execution Control".
//!
//! Any image is accepted. From PTX text the entries are read; of a cubin or fatbin
//! any name asked for is taken to exist. `cuLink…` compiles nothing: PTX is put together as it is, and
//! has the entries and variables of all parts; with anything else among the parts the result is opaque,
//! as any cubin is here.

use crate::abi::{
    Header, Result, cstr, enliven, exports, get, handle, kill, object, put, put_if, resolve,
};
use crate::context::{Context, current};
use crate::driver::{Driver, contexts_lock, driver, lock};
use crate::pool;
use crate::ptx::{self, ELF, Entry};
use simgpu::config::{Duration, MemoryConfig};
use simgpu::memory::Use;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND,
    CUDA_ERROR_OUT_OF_MEMORY, CUdevice, CUfunction, CUkernel, CUlibrary, CUmodule,
};

/// `CU_JIT_INPUT_PTX`, and the greatest of `CU_JIT_INPUT_*`.
const PTX: c_int = 1;
const LAST_INPUT: c_int = 5;
/// `CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES`, `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`: "on output, contains
/// the amount of log buffer filled".
const LOG_SIZES: [c_int; 2] = [4, 6];
/// `CU_FUNC_ATTRIBUTE_*` below this are kept.
const ATTRIBUTES: usize = 16;

/// A loaded module or library. A library belongs to the context that was current when it was
/// loaded, where the real one belongs to none.
#[repr(C)]
pub(crate) struct Module {
    header: Header,
    context: &'static Context,
    image: ptx::Image,
    functions: Mutex<BTreeMap<String, &'static Function>>,
    /// Bytes charged for its functions that are loaded.
    code: Mutex<u64>,
}

object!(Module, 0x4d4f_4455);

/// A kernel. A library's `CUkernel` and a module's `CUfunction` are the same here.
#[repr(C)]
pub(crate) struct Function {
    header: Header,
    module: &'static Module,
    pub duration: Duration,
    pub entry: Entry,
    attributes: [i32; ATTRIBUTES],
    loaded: AtomicBool,
}

object!(Function, 0x4655_4e43);

static LOADED: Mutex<Vec<&'static Module>> = Mutex::new(Vec::new());

fn load(context: &'static Context, image: *const c_void) -> Result<&'static Module> {
    let image = ptx::Image::read(image).ok_or(CUDA_ERROR_INVALID_IMAGE)?;
    let driver = driver()?;
    let context = context.owner();
    // Since CUDA 12.3 code is loaded during captures (NVIDIA Warp's manual, `capture_begin`).
    if driver.session.config().cuda_version < 12_030 {
        crate::capture::permit()?;
    }
    context.device.check()?;
    let overhead = driver.session.config().memory.module_overhead_bytes;
    if !pool::charge(driver, context.device.gpu, overhead) {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let module: &'static Module = Box::leak(Box::new(Module {
        header: Header::new(),
        context,
        image,
        functions: Mutex::default(),
        code: Mutex::default(),
    }));
    lock(&LOADED).push(module);
    let module = enliven(module);
    let alone = context.calls.alone();
    drain(context)?;
    drop(alone);
    if is_eager(driver) {
        let image = module.image_bytes(&driver.session.config().memory);
        if image > 0 && !pool::charge(driver, context.device.gpu, image) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        *lock(&module.code) = image;
        for name in module.image.entries() {
            module.function(name)?;
        }
    }
    Ok(module)
}

/// Waits for the context's work, as the driver does before it changes the code that the GPU can reach.
fn drain(context: &'static Context) -> Result<()> {
    if contexts_lock() { context.wait() } else { Ok(()) }
}

/// Whether a module's code is loaded with the module. Lazy loading is the default since 12.2: CUDA
/// Programming Guide, "Lazy Loading".
fn is_eager(driver: &Driver) -> bool {
    static EAGER: OnceLock<bool> = OnceLock::new();
    *EAGER.get_or_init(|| match std::env::var("CUDA_MODULE_LOADING").as_deref() {
        Ok("EAGER") => true,
        Ok("LAZY") => false,
        _ => {
            let config = driver.session.config();
            !config.driver.lazy_loading || config.cuda_version < 12_020
        }
    })
}

fn unload(driver: &Driver, module: &'static Module) {
    if !kill(module) {
        return;
    }
    lock(&LOADED).retain(|m| !std::ptr::eq(*m, module));
    for function in lock(&module.functions).values() {
        kill(*function);
    }
    let overhead = driver.session.config().memory.module_overhead_bytes;
    let overhead = overhead + std::mem::take(&mut *lock(&module.code));
    driver.session.uncharge(module.context.device.gpu, Use::Own, overhead);
}

fn unload_now(driver: &Driver, module: &'static Module) -> Result<()> {
    let alone = module.context.calls.alone();
    drain(module.context)?;
    drop(alone);
    unload(driver, module);
    Ok(())
}

pub(crate) fn unload_all_of(driver: &Driver, context: &'static Context) {
    let loaded: Vec<_> =
        lock(&LOADED).iter().copied().filter(|m| std::ptr::eq(m.context, context)).collect();
    for module in loaded {
        unload(driver, module);
    }
}

impl Module {
    /// What its code takes beyond what any module does. A library's kernels come with all that they were compiled with:
    /// rapidsai/cudf#4718 (316 MiB), NVIDIA/DALI#4287 (400 MB).
    fn image_bytes(&self, memory: &MemoryConfig) -> u64 {
        let beyond = self.image.bytes().saturating_sub(memory.module_overhead_bytes);
        beyond.checked_next_multiple_of(memory.granularity_bytes).unwrap_or(u64::MAX)
    }

    fn function(&'static self, name: &str) -> Result<&'static Function> {
        let function = self.find(name)?;
        if is_eager(driver()?) {
            function.load()?;
        }
        Ok(function)
    }

    fn find(&'static self, name: &str) -> Result<&'static Function> {
        let entry = self.image.entry(name).ok_or(CUDA_ERROR_NOT_FOUND)?;
        let config = driver()?.session.config();
        let mut functions = lock(&self.functions);
        if let Some(function) = functions.get(name) {
            return Ok(function);
        }
        let gpu = &self.context.device.config;
        let version = i32::try_from(gpu.compute_capability.0 * 10 + gpu.compute_capability.1);
        let version = version.unwrap_or(0);
        let local = i32::try_from(entry.local_bytes).unwrap_or(i32::MAX);
        // Threads per block, local memory, registers, PTX and binary version, carve-out.
        let attributes = [1024, 0, 0, local, 32, version, version, 0, 0, -1, 0, 0, 0, 0, 0, 0];
        let function: &'static Function = Box::leak(Box::new(Function {
            header: Header::new(),
            module: self,
            duration: config.kernel_duration(name),
            entry,
            attributes,
            loaded: AtomicBool::new(false),
        }));
        functions.insert(name.to_owned(), enliven(function));
        Ok(function)
    }
}

impl Function {
    /// Loads its code, as lazy loading does at its first use: the context's other calls wait.
    #[inline]
    pub(crate) fn load(&self) -> Result<()> {
        if self.loaded.load(Ordering::Relaxed) { Ok(()) } else { self.load_now() }
    }

    #[cold]
    fn load_now(&self) -> Result<()> {
        let driver = driver()?;
        let memory = &driver.session.config().memory;
        let mut code = lock(&self.module.code);
        if self.loaded.load(Ordering::Relaxed) {
            return Ok(());
        }
        let bytes = if *code == 0 { self.module.image_bytes(memory) } else { 0 };
        let gpu = self.module.context.device.gpu;
        if bytes > 0 && !pool::charge(driver, gpu, bytes) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        *code += bytes;
        let _alone = self.module.context.calls.alone();
        drain(self.module.context)?;
        let load_ns = driver.session.config().costs.load_ns;
        if load_ns > 0 {
            simgpu::clock::sleep_until(simgpu::clock::now_ns() + load_ns);
        }
        self.loaded.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn attribute(&self, which: c_int) -> Result<i32> {
        let value = usize::try_from(which).ok().and_then(|at| self.attributes.get(at));
        value.copied().ok_or(CUDA_ERROR_INVALID_VALUE)
    }
}

exports! {
    fn cuModuleLoadData(image: *const c_void) -> CUmodule {
        Ok(handle(load(current()?, image)?))
    }
    fn cuModuleUnload(module: CUmodule) {
        let driver = driver()?;
        unload_now(driver, resolve(module)?)
    }
    fn cuModuleGetFunction(module: CUmodule, name: *const c_char) -> CUfunction {
        Ok(handle(resolve::<Module>(module)?.function(cstr(name)?)?))
    }
    fn cuModuleGetLoadingMode() -> c_int {
        // CU_MODULE_EAGER_LOADING, …_LAZY_LOADING.
        Ok(if is_eager(driver()?) { 1 } else { 2 })
    }

    fn cuLibraryLoadData(code: *const c_void, _jit: *mut c_int, _jit_values: *mut *mut c_void, _jit_count: c_uint, _options: *mut c_int, _values: *mut *mut c_void, _count: c_uint) -> CUlibrary {
        Ok(handle(load(current()?, code)?))
    }
    fn cuLibraryUnload(library: CUlibrary) {
        let driver = driver()?;
        unload_now(driver, resolve(library)?)
    }
    fn cuLibraryGetKernel(library: CUlibrary, name: *const c_char) -> CUkernel {
        Ok(handle(resolve::<Module>(library)?.function(cstr(name)?)?))
    }
    fn cuKernelGetFunction(kernel: CUkernel) -> CUfunction {
        Ok(handle(resolve::<Function>(kernel)?))
    }
    fn cuKernelGetAttribute(which: c_int, kernel: CUkernel, _dev: CUdevice) -> c_int {
        resolve::<Function>(kernel)?.attribute(which)
    }
    fn cuKernelGetParamInfo(kernel: CUkernel, index: usize, offset: *mut usize, size: *mut usize) {
        let function: &Function = resolve(kernel)?;
        // "CUDA_ERROR_INVALID_VALUE" behind the last parameter, and for images that can't tell.
        let parameter = function.entry.parameters.get(index).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        put(offset, number(parameter.offset))?;
        put_if(size, number(parameter.size));
        Ok(())
    }

    fn cuFuncGetAttribute(which: c_int, function: CUfunction) -> c_int {
        resolve::<Function>(function)?.attribute(which)
    }
    fn cuFuncIsLoaded(function: CUfunction) -> c_int {
        let function: &Function = resolve(function)?;
        // CU_FUNCTION_LOADING_STATE_UNLOADED, …_LOADED.
        Ok(c_int::from(function.loaded.load(Ordering::Relaxed)))
    }
    fn cuFuncLoad(function: CUfunction) {
        resolve::<Function>(function)?.load()
    }
}

#[repr(C)]
pub(crate) struct Link {
    header: Header,
    parts: Mutex<Parts>,
}

#[derive(Default)]
struct Parts {
    text: Vec<u8>,
    opaque: bool,
    /// "owned by the CUlinkState", until it is destroyed.
    complete: Option<Box<[u8]>>,
}

object!(Link, 0x4c49_4e4b);

type CUlinkState = *mut c_void;

fn add_part(link: CUlinkState, kind: c_int, bytes: &[u8]) -> Result<()> {
    let link: &Link = resolve(link)?;
    let mut parts = lock(&link.parts);
    if parts.complete.is_some() || !(0..=LAST_INPUT).contains(&kind) || bytes.is_empty() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if kind != PTX {
        parts.opaque = true;
        return Ok(());
    }
    if ptx::Image::of(bytes).is_none() {
        return Err(CUDA_ERROR_INVALID_IMAGE);
    }
    parts.text.extend_from_slice(bytes.strip_suffix(b"\0").unwrap_or(bytes));
    parts.text.push(b'\n');
    Ok(())
}

exports! {
    fn cuLinkCreate, cuLinkCreate_v2(count: c_uint, options: *const c_int, values: *mut usize, out: *mut CUlinkState) {
        current()?;
        for i in 0..count as usize {
            if LOG_SIZES.contains(&get(options.wrapping_add(i))?) {
                put(values.wrapping_add(i), 0)?;
            }
        }
        let link = Link { header: Header::new(), parts: Mutex::default() };
        put(out, handle(enliven(Box::leak(Box::new(link)))))
    }
    fn cuLinkAddData, cuLinkAddData_v2(link: CUlinkState, kind: c_int, data: *const c_void, size: usize, _name: *const c_char, _count: c_uint, _options: *const c_int, _values: *mut usize) {
        if data.is_null() || size == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller promises `size` readable bytes.
        add_part(link, kind, unsafe { std::slice::from_raw_parts(data.cast(), size) })
    }
    fn cuLinkComplete(link: CUlinkState, image: *mut *const c_void, size: *mut usize) {
        let link: &Link = resolve(link)?;
        let mut parts = lock(&link.parts);
        if parts.text.is_empty() && !parts.opaque {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let bytes = if parts.opaque {
            let mut cubin = vec![0u8; 64];
            cubin[..4].copy_from_slice(&ELF);
            cubin
        } else {
            let mut text = std::mem::take(&mut parts.text);
            text.push(0);
            text
        };
        let complete = parts.complete.get_or_insert(bytes.into_boxed_slice());
        put(image, complete.as_ptr().cast())?;
        put_if(size, complete.len());
        Ok(())
    }
    fn cuLinkDestroy(link: CUlinkState) {
        let link: &'static Link = resolve(link)?;
        if kill(link) {
            *lock(&link.parts) = Parts::default();
        }
        Ok(())
    }
}
