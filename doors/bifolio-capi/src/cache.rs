//! A cache: its options, building it, opening files in it, its statistics, closing it.
//!
//! # Safety
//! Dereferences pointers from C, under the contract of the crate's head.
#![allow(unsafe_code)]

use crate::advice::bifolio_evicted;
use crate::boundary::{
    Failure, Output, Versioned, VersionedOutput, choice, guard, handle, options, path, text,
};
use crate::file::bifolio_file;
use crate::result::bifolio_result;
use crate::stats::{bifolio_stats, stats_of};
use bifolio::{Cache, CacheBuilder, DirectIo, FaultMode, File, HugePages, OpenOptions};
use std::ffi::{c_char, c_int};
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::Duration;

/// A page cache with a hard bound on memory.
#[derive(Debug)]
pub struct bifolio_cache {
    cache: Cache,
}

impl bifolio_cache {
    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }
}

/// Values of `bifolio_cache_options.huge_pages`.
#[repr(u32)]
#[derive(Clone, Copy, Debug)]
pub enum bifolio_huge_pages {
    /// 2 MiB pages where the system allows them.
    BIFOLIO_HUGE_PAGES_AUTO = 0,
    /// Base pages only.
    BIFOLIO_HUGE_PAGES_NEVER = 1,
    /// Building the cache fails where the system does not allow them.
    BIFOLIO_HUGE_PAGES_REQUIRE = 2,
}

/// Values of `bifolio_open_options.faults`.
#[repr(u32)]
#[derive(Clone, Copy, Debug)]
pub enum bifolio_faults {
    /// A thread that touches a page of a map that is not resident waits for a thread of the cache,
    /// which reads it.
    BIFOLIO_FAULTS_THREADS = 0,
    /// It reads the page itself, in a handler of SIGBUS, which is quicker. The program then touches
    /// no map inside an allocator, from a small stack, or in a thread that blocks SIGBUS; a handler
    /// of SIGBUS that is installed later passes on signals that are not its own; and a system call
    /// on a page that is not resident fails with `EFAULT`.
    BIFOLIO_FAULTS_IN_THREAD = 1,
}

/// Values of `bifolio_open_options.direct`.
#[repr(u32)]
#[derive(Clone, Copy, Debug)]
pub enum bifolio_direct {
    /// Bypasses the kernel's page cache where the file system allows it.
    BIFOLIO_DIRECT_AUTO = 0,
    /// Always through the kernel's page cache.
    BIFOLIO_DIRECT_NEVER = 1,
    /// Bypasses the kernel's page cache, or the open fails.
    BIFOLIO_DIRECT_REQUIRE = 2,
}

/// For `bifolio_cache_options.flags`: makes the memory resident when the cache is built.
pub const BIFOLIO_CACHE_PREFAULT: u32 = 1;

/// For `bifolio_cache_options.readahead_bytes_max`: nothing is read ahead.
pub const BIFOLIO_READAHEAD_NONE: u64 = u64::MAX;

/// For `bifolio_open_options.flags`: reading and pinning. This is also the meaning of no flag.
pub const BIFOLIO_OPEN_READ: u32 = 1;
/// For `bifolio_open_options.flags`: writing and changing the length.
pub const BIFOLIO_OPEN_WRITE: u32 = 2;
/// For `bifolio_open_options.flags`: creates the file if it does not exist. Requires writing.
pub const BIFOLIO_OPEN_CREATE: u32 = 4;
/// For `bifolio_open_options.flags`: truncates the file to length 0. Requires writing.
pub const BIFOLIO_OPEN_TRUNCATE: u32 = 8;
/// For `bifolio_open_options.flags`: a promise that the bytes do not change while the file is open.
/// Excludes writing, by any handle of this cache.
pub const BIFOLIO_OPEN_IMMUTABLE: u32 = 16;
/// For `bifolio_open_options.flags`: the file can be mapped (`bifolio_map_new`).
pub const BIFOLIO_OPEN_MAPPABLE: u32 = 32;
/// For `bifolio_open_options.flags`: creates the file, and fails if the path exists. Requires
/// writing.
pub const BIFOLIO_OPEN_CREATE_NEW: u32 = 64;
/// For `bifolio_open_options.flags`: locks the file against other programs and other caches while
/// it is open (`F_OFD_SETLK`). The lock is advisory: programs that take none are not kept out.
/// Requires writing.
pub const BIFOLIO_OPEN_EXCLUSIVE: u32 = 128;

const OPEN_FLAGS: u32 = 255;

/// Settings of a cache. Set `size` to `sizeof(bifolio_cache_options)` and everything else to zero,
/// which selects the defaults; then change what you need: `bifolio_cache_options options = { .size
/// = sizeof options };`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_cache_options {
    /// `sizeof(bifolio_cache_options)`.
    pub size: usize,
    /// Bound on memory, bytes: frames, descriptors and tables together. Default 256 MiB, minimum
    /// 256 KiB.
    pub memory_bytes: u64,
    /// Upper bound for `bifolio_cache_set_memory`, bytes. Default: all of the machine's memory.
    pub memory_bytes_max: u64,
    /// Dirty bytes at which writers wait for the device. Default 2/3 of the bound, which is also
    /// the maximum.
    pub dirty_bytes_max: u64,
    /// Dirty bytes at which the flusher starts to write. Default a quarter of the bound.
    pub dirty_bytes_background: u64,
    /// Age at which a dirty page is written out, however little is dirty, milliseconds. Default
    /// 5,000.
    pub dirty_age_ms_max: u64,
    /// Maximum wait of a call for memory that other calls hold briefly, milliseconds. Default
    /// 10,000.
    pub reclaim_wait_ms_max: u64,
    /// Largest readahead window, bytes. Default 8 MiB; `BIFOLIO_READAHEAD_NONE` for none.
    pub readahead_bytes_max: u64,
    /// Upper bound on the swap, bytes. Default 1 TiB.
    pub swap_bytes_max: u64,
    /// Directory of a temporary file to which pages of memory files are swapped when memory is
    /// short; null for no swap.
    pub swap_directory: *const c_char,
    /// Maximum transfers in flight per call, 1 to 1024. Default 64.
    pub io_depth: u32,
    /// One of `bifolio_huge_pages`.
    pub huge_pages: u32,
    /// `BIFOLIO_CACHE_PREFAULT`, or 0.
    pub flags: u32,
    /// Number of closed files whose clean pages stay, for the next open to find if nothing has
    /// changed the file. Default 0: the pages of a file are freed with its last handle. Each takes
    /// an inotify watch; an open holds a read lease for a moment.
    pub kept_files: u32,
    /// Bytes down to which the bound falls while tasks wait for memory; it rises again afterwards.
    /// Default 0: the bound is only the program's. At least 256 KiB and four chunks, and at most
    /// the bound.
    pub memory_bytes_under_pressure: u64,
}

// SAFETY: `repr(C)`, begins with its size, integers and pointers only, for which zeros are valid.
unsafe impl Versioned for bifolio_cache_options {
    const SIZE_MIN: usize = 96;
}

/// Options of an open. Set `size` to `sizeof(bifolio_open_options)` and everything else to zero,
/// which selects the defaults; then change what you need.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_open_options {
    /// `sizeof(bifolio_open_options)`.
    pub size: usize,
    /// `BIFOLIO_OPEN_*`, or-ed together; 0 is `BIFOLIO_OPEN_READ`.
    pub flags: u32,
    /// One of `bifolio_direct`.
    pub direct: u32,
    /// Bytes of a folio, the unit of residency and of pins: a power of two from 4 KiB, the default,
    /// to 2 MiB; below a bound of 32 MiB at most a 32nd of the bound that the cache was made with,
    /// or 64 KiB. All handles of a file must agree.
    pub folio_bytes: u64,
    /// Maximum length of the file while it is open, bytes; `bifolio_file_raise_len_max` raises it.
    /// Default 1 TiB, or 64 GiB for a mappable
    /// file, or four times its length.
    pub len_max_bytes: u64,
    /// Permission bits of a file that this open creates, before the umask; 0 for 0666.
    pub mode: u32,
    /// One of `bifolio_faults`, for a mappable file.
    pub faults: u32,
    /// Name of the class of the file (`bifolio_class_set`); null for none, or for that of the other
    /// handles of the file.
    pub class_name: *const c_char,
}

// SAFETY: `repr(C)`, begins with its size, integers and pointers only, for which zeros are valid.
unsafe impl Versioned for bifolio_open_options {
    const SIZE_MIN: usize = 40;
}

/// Builds a cache. `options` may be null for the defaults. The cache starts a few threads and takes
/// memory as it needs it.
///
/// Threads: any. Blocks: for the system, and for all of the memory with `BIFOLIO_CACHE_PREFAULT`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_new(
    options: *const bifolio_cache_options,
    cache: *mut *mut bifolio_cache,
) -> bifolio_result {
    guard(|| {
        let output = Output::new(cache, "cache")?;
        // SAFETY: null, or options that begin with their size.
        let builder = unsafe { builder(options)? };
        let cache = Box::into_raw(Box::new(bifolio_cache { cache: builder.build()? }));
        // SAFETY: the caller's variable.
        unsafe { output.set(cache) };
        Ok(())
    })
}

/// Returns the builder that the options describe.
///
/// # Safety
/// Null, or options that begin with their size and whose paths end with a zero byte.
pub(crate) unsafe fn builder(
    pointer: *const bifolio_cache_options,
) -> Result<CacheBuilder, Failure> {
    // SAFETY: the same contract.
    let options = unsafe { options(pointer, "options")? };
    let mut builder = Cache::builder();
    type Setter = fn(CacheBuilder, u64) -> CacheBuilder;
    let numbers: [(u64, Setter); 10] = [
        (options.memory_bytes, CacheBuilder::memory),
        (options.memory_bytes_max, CacheBuilder::memory_max),
        (options.dirty_bytes_max, CacheBuilder::dirty_max),
        (options.dirty_bytes_background, CacheBuilder::dirty_background),
        (options.dirty_age_ms_max, |builder, ms| builder.dirty_age_max(Duration::from_millis(ms))),
        (options.reclaim_wait_ms_max, |builder, ms| {
            builder.reclaim_wait_max(Duration::from_millis(ms))
        }),
        (options.swap_bytes_max, CacheBuilder::swap_max),
        (options.io_depth.into(), |builder, depth| builder.io_depth(depth as usize)),
        (options.kept_files.into(), |builder, files| builder.kept_files(files as usize)),
        (options.memory_bytes_under_pressure, CacheBuilder::memory_under_pressure),
    ];
    for (number, set) in numbers {
        if number != 0 {
            builder = set(builder, number);
        }
    }
    match options.readahead_bytes_max {
        0 => {}
        BIFOLIO_READAHEAD_NONE => builder = builder.readahead_max(0),
        bytes => builder = builder.readahead_max(bytes),
    }
    if options.flags & !BIFOLIO_CACHE_PREFAULT != 0 {
        return Err(unknown_flags(options.flags));
    }
    builder = builder.prefault(options.flags & BIFOLIO_CACHE_PREFAULT != 0);
    builder = builder.huge_pages(huge_pages(options.huge_pages)?);
    if !options.swap_directory.is_null() {
        // SAFETY: the caller's path.
        let directory = unsafe { path(options.swap_directory, "swap_directory")? };
        builder = builder.swap_directory(directory);
    }
    Ok(builder)
}

fn huge_pages(number: u32) -> Result<HugePages, Failure> {
    use bifolio_huge_pages::*;
    let table = [
        (BIFOLIO_HUGE_PAGES_AUTO as u32, HugePages::Auto),
        (BIFOLIO_HUGE_PAGES_NEVER as u32, HugePages::Never),
        (BIFOLIO_HUGE_PAGES_REQUIRE as u32, HugePages::Require),
    ];
    choice(number, &table, "huge_pages")
}

fn unknown_flags(flags: u32) -> Failure {
    Failure::Misuse(format!("options: flags has bits that stand for nothing: {flags:#x}"))
}

/// Returns the open options that the struct describes, and whether the file is immutable.
///
/// # Safety
/// Null, or options that begin with their size and whose texts end with a zero byte.
unsafe fn open_options_by_path(
    pointer: *const bifolio_open_options,
) -> Result<(OpenOptions, bool), Failure> {
    // SAFETY: the same contract.
    let options = unsafe { options(pointer, "options")? };
    let flags = options.flags;
    if flags & !OPEN_FLAGS != 0 {
        return Err(unknown_flags(flags));
    }
    let has = |flag: u32| flags & flag != 0;
    let direct = [
        (bifolio_direct::BIFOLIO_DIRECT_AUTO as u32, DirectIo::Auto),
        (bifolio_direct::BIFOLIO_DIRECT_NEVER as u32, DirectIo::Never),
        (bifolio_direct::BIFOLIO_DIRECT_REQUIRE as u32, DirectIo::Require),
    ];
    let mut open = OpenOptions::new()
        .read(has(BIFOLIO_OPEN_READ) || has(BIFOLIO_OPEN_IMMUTABLE) || flags == 0)
        .write(has(BIFOLIO_OPEN_WRITE))
        .create(has(BIFOLIO_OPEN_CREATE))
        .truncate(has(BIFOLIO_OPEN_TRUNCATE))
        .mappable(has(BIFOLIO_OPEN_MAPPABLE))
        .create_new(has(BIFOLIO_OPEN_CREATE_NEW))
        .exclusive(has(BIFOLIO_OPEN_EXCLUSIVE))
        .direct(choice(options.direct, &direct, "direct")?);
    // 0 asks for neither kind: the first open decides.
    if options.faults != bifolio_faults::BIFOLIO_FAULTS_THREADS as u32 {
        let faults = [(bifolio_faults::BIFOLIO_FAULTS_IN_THREAD as u32, FaultMode::InThread)];
        open = open.faults(choice(options.faults, &faults, "faults")?);
    }
    if options.folio_bytes != 0 {
        open = open.folio_bytes(options.folio_bytes);
    }
    if options.len_max_bytes != 0 {
        open = open.len_max(options.len_max_bytes);
    }
    if options.mode != 0 {
        open = open.mode(options.mode);
    }
    if !options.class_name.is_null() {
        // SAFETY: text of the caller.
        open = open.class(unsafe { text(options.class_name, "class_name")? }.to_string_lossy());
    }
    Ok((open, has(BIFOLIO_OPEN_IMMUTABLE)))
}

/// Returns the open options of a file that is not opened by its path.
///
/// # Safety
/// Null, or options that begin with their size and whose texts end with a zero byte.
pub(crate) unsafe fn open_options(
    pointer: *const bifolio_open_options,
) -> Result<OpenOptions, Failure> {
    // SAFETY: the same contract.
    match unsafe { open_options_by_path(pointer)? } {
        (options, false) => Ok(options),
        (_, true) => {
            let problem = "options: BIFOLIO_OPEN_IMMUTABLE is for bifolio_cache_open only";
            Err(Failure::Misuse(problem.to_owned()))
        }
    }
}

/// Opens a file of a cache, and hands its handle to the caller.
///
/// # Safety
/// `cache` is null or a live handle, `file` null or a variable of the caller.
pub(crate) unsafe fn open_with(
    cache: *const bifolio_cache,
    file: *mut *mut bifolio_file,
    open: impl FnOnce(&Cache) -> Result<bifolio_file, Failure>,
) -> bifolio_result {
    guard(|| {
        let output = Output::new(file, "file")?;
        // SAFETY: the contract.
        let cache = unsafe { handle(cache, "cache")? };
        let opened = open(&cache.cache)?.into_raw();
        // SAFETY: the contract.
        unsafe { output.set(opened) };
        Ok(())
    })
}

/// Opens the regular file at `path`. `options` may be null: for reading. A file that is already
/// open in this cache is shared: one length, one copy of its pages. Close it with
/// `bifolio_file_close`.
///
/// Threads: any, at the same time. Blocks: for the file system.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_open(
    cache: *const bifolio_cache,
    path: *const c_char,
    options: *const bifolio_open_options,
    file: *mut *mut bifolio_file,
) -> bifolio_result {
    let open = |cache: &Cache| {
        // SAFETY: null, or text of the caller.
        let path = unsafe { crate::boundary::path(path, "path")? };
        // SAFETY: null, or options that begin with their size.
        match unsafe { open_options_by_path(options)? } {
            (options, false) => Ok(cache.open(path, &options)?.into()),
            (options, true) => Ok(File::from(cache.open_immutable(path, &options)?).into()),
        }
    };
    // SAFETY: null, or a live handle and the caller's variable.
    unsafe { open_with(cache, file, open) }
}

/// Opens the regular file of `descriptor`. The descriptor then belongs to the cache: it is closed
/// with the file. If the call fails it is closed before the call returns, or with the file if that
/// is open in this cache already. (If a pointer is null or an option invalid, it still belongs to
/// the caller.)
///
/// Threads: any, at the same time. Blocks: for the file system.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_open_fd(
    cache: *const bifolio_cache,
    descriptor: c_int,
    options: *const bifolio_open_options,
    file: *mut *mut bifolio_file,
) -> bifolio_result {
    let open = |cache: &Cache| {
        // SAFETY: null, or options that begin with their size.
        let options = unsafe { open_options(options)? };
        // SAFETY: asks only whether there is such a descriptor.
        if descriptor < 0 || unsafe { libc::fcntl(descriptor, libc::F_GETFD) } < 0 {
            return Err(Failure::Misuse(format!("descriptor: {descriptor} is not open")));
        }
        // SAFETY: open, and the caller gives it to us.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Ok(cache.open_fd(descriptor, &options)?.into())
    };
    // SAFETY: null, or a live handle and the caller's variable.
    unsafe { open_with(cache, file, open) }
}

/// Creates an empty memory file, for scratch space: its bytes are freed with its last handle.
/// `name` is used in messages only. `options` may be null: for reading and writing. Without a swap
/// its bytes stay in memory, within the bound.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_memory_file(
    cache: *const bifolio_cache,
    name: *const c_char,
    options: *const bifolio_open_options,
    file: *mut *mut bifolio_file,
) -> bifolio_result {
    let open = |cache: &Cache| {
        // SAFETY: null, or text of the caller.
        let name = unsafe { text(name, "name")? }.to_string_lossy();
        let options = if options.is_null() {
            OpenOptions::new().write(true)
        } else {
            // SAFETY: options that begin with their size.
            unsafe { open_options(options)? }
        };
        Ok(cache.memory_file_with(&name, &options)?.into())
    };
    // SAFETY: null, or a live handle and the caller's variable.
    unsafe { open_with(cache, file, open) }
}

/// Writes the counters and the memory use of the cache to `stats`, whose `size` states its size.
///
/// Threads: any, at the same time. Blocks: briefly, for locks; it visits each open file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_stats(
    cache: *const bifolio_cache,
    stats: *mut bifolio_stats,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let cache = unsafe { handle(cache, "cache")? };
        // SAFETY: null, or a struct that begins with its size.
        let output = unsafe { VersionedOutput::new(stats, "stats")? };
        let counts = stats_of(&cache.cache);
        // SAFETY: the caller's struct, as long as its size says.
        unsafe { output.set(&counts) };
        Ok(())
    })
}

/// Changes the bound on memory. Shrinking evicts pages, writes dirty ones out, and returns memory
/// to the system before it returns. On an error the bound is unchanged.
///
/// The bound is at least 256 KiB, and an eighth of the one that the cache was made with, or 8 MiB
/// if that is less: memory is taken in chunks, whose size stays.
///
/// Threads: any, at the same time. Blocks: for the devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_set_memory(
    cache: *const bifolio_cache,
    memory_bytes: u64,
) -> bifolio_result {
    // SAFETY: null, or a live handle.
    guard(|| Ok(unsafe { handle(cache, "cache")? }.cache.set_memory(memory_bytes)?))
}

/// Evicts the clean, unused folios of all open files, and starts the write-out of dirty ones.
/// `evicted` may be null.
///
/// Threads: any, at the same time. Blocks: for no device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_evict_all(
    cache: *const bifolio_cache,
    evicted: *mut bifolio_evicted,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let found = unsafe { handle(cache, "cache")? }.cache.evict_all()?;
        // SAFETY: null, or the caller's variable.
        unsafe { bifolio_evicted::write(found, evicted) };
        Ok(())
    })
}

/// Makes everything written to the cache's files durable, and closes the cache. On success the
/// handle is freed; calls on files that are still open return `BIFOLIO_ERROR_CLOSED`, and their
/// handles must be freed. On an error nothing is changed or lost: fix the cause and close again, or
/// give up with `bifolio_cache_free`.
///
/// Threads: any, while no other call uses the handle. Blocks: for the devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_close(cache: *mut bifolio_cache) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        unsafe { handle(cache, "cache")? }.cache.close()?;
        // SAFETY: made by `bifolio_cache_new`, and no other call uses it.
        drop(unsafe { Box::from_raw(cache) });
        Ok(())
    })
}

/// Frees a handle without a result: the cache itself ends with its last file, which makes durable
/// what it can; other bytes are lost, which is only logged. Null is allowed.
///
/// Threads: any, while no other call uses the handle. Blocks: for the devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_free(cache: *mut bifolio_cache) {
    if !cache.is_null() {
        // SAFETY: made by `bifolio_cache_new`, and no other call uses it.
        let cache = unsafe { Box::from_raw(cache) };
        guard(|| {
            drop(cache);
            Ok(())
        });
    }
}
