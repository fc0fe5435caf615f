//! The process: detection of a fork ([`Origin`]), its CPUs, and the threads of the cache
//! ([`OwnedThread`]).
//!
//! A page that the kernel wipes in children holds the number of the process: checking it costs one
//! load. In a child it is 0 until the child creates something of its own, and then another number.
//! Where the kernel cannot wipe, the process id is compared instead, which is a system call.
//!
//! A thread has a name, a small stack, and no signal that another thread can take. It is created by
//! `pthread_create`: `std::thread` gives each thread a stack for signals, and panics in the new
//! thread if the process has no mappings left for that (`vm.max_map_count`). Here that is an error
//! of the start.
//!
//! # Safety
//! The mark is in a page that is never freed. The start routine gets a box that it alone owns. A
//! thread is joined or detached once, by its owner. Sets of signals live on the stack.
#![allow(unsafe_code)]

use super::memory::{PAGE_BYTES, Reservation, refuse_access};
use std::ffi::{CStr, CString, c_void};
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The word in a page that the kernel wipes in children; `None` where it cannot.
static MARK: OnceLock<Option<&'static AtomicU64>> = OnceLock::new();
/// Last number assigned to a process, as far as this process knows. A child starts from its
/// parent's value, so no two processes in one line of descent have the same number.
static LAST_NUMBER: AtomicU64 = AtomicU64::new(0);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Marked(u64),
    Process(u32),
}

fn mark() -> Option<&'static AtomicU64> {
    let make = || {
        let page = ManuallyDrop::new(Reservation::new(PAGE_BYTES, PAGE_BYTES).ok()?);
        // SAFETY: zeroed memory that is aligned, never freed, and only used through this reference.
        page.wipe_on_fork().then(|| unsafe { AtomicU64::from_ptr(page.base.cast()) })
    };
    *MARK.get_or_init(make)
}

impl Origin {
    pub(crate) fn here() -> Self {
        let Some(mark) = mark() else { return Self::by_process() };
        // Relaxed: only the value counts; of two threads that find 0, one assigns the number.
        let seen = mark.load(Ordering::Relaxed);
        if seen != 0 {
            return Self::Marked(seen);
        }
        let number = LAST_NUMBER.fetch_add(1, Ordering::Relaxed) + 1;
        let given = mark.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
        Self::Marked(given.map_or_else(|other| other, |_| number))
    }

    pub(crate) fn by_process() -> Self {
        Self::Process(std::process::id())
    }

    /// Returns `true` if the caller is in a child of that process.
    pub(crate) fn is_forked(self) -> bool {
        match self {
            Self::Marked(number) => {
                mark().is_none_or(|mark| mark.load(Ordering::Relaxed) != number)
            }
            Self::Process(process) => std::process::id() != process,
        }
    }
}

/// Returns the CPU that runs the calling thread, a hint. Since glibc 2.35 it makes no system call.
pub(crate) fn current_cpu() -> usize {
    rustix::thread::sched_getcpu()
}

/// Returns the number of CPUs that the machine is configured for; at least 1.
pub(crate) fn possible_cpus() -> usize {
    // SAFETY: the call has no demands.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    usize::try_from(count).unwrap_or(1).max(1)
}

/// Stack size of the cache's threads, beside the thread-local storage that the C library takes
/// from it; touched as needed. `Backing` and `docs/maps.md` document it, because a user's backing
/// runs on these stacks, too.
const STACK_BYTES: usize = 256 << 10;

const NAME_BYTES_MAX: usize = 15;

/// A running thread with a name and a small stack. The drop joins it; its owner has requested its
/// end before.
#[derive(Debug)]
pub(crate) struct OwnedThread {
    /// None once it is detached.
    thread: Option<libc::pthread_t>,
    /// Detects a fork: a child inherits this value, but not the thread.
    origin: Origin,
}

impl OwnedThread {
    /// Starts a thread that blocks every signal which another thread can take. A panic of `run`
    /// ends it, after the panic hook has reported it.
    ///
    /// # Errors
    /// `EAGAIN` at a limit of threads; `ENOMEM` without memory or mappings for its stack.
    pub(crate) fn start(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let name = CString::new(&name[..name.len().min(NAME_BYTES_MAX)])?;
        let run = move || {
            // A nameless thread works, too.
            let _ = rustix::thread::set_name(&name);
            run();
        };
        // Held until the thread has inherited the mask.
        let _blocked = block_asynchronous();
        let stack_bytes = STACK_BYTES + thread_storage_bytes();
        // Succeeds if the process may have the mappings of a stack and its guard page.
        let has_room = || {
            let room = Reservation::new(stack_bytes, PAGE_BYTES)?;
            refuse_access(room.base.wrapping_add(PAGE_BYTES), PAGE_BYTES)
        };
        let thread = create(Box::new(run), stack_bytes).map_err(|error| match has_room() {
            // The C library does not tell mappings from threads.
            Err(lack) if error.raw_os_error() == Some(libc::EAGAIN) => lack,
            _ => error,
        })?;
        Ok(Self { thread: Some(thread), origin: Origin::here() })
    }

    /// Lets the thread run without an owner, until it ends by itself.
    pub(crate) fn detach(mut self) {
        if let Some(thread) = self.thread.take() {
            detach(thread);
        }
    }

    /// Returns `true` in a forked child: the thread does not exist, and nothing it shares may be
    /// touched.
    pub(crate) fn is_of_parent(&self) -> bool {
        self.origin.is_forked()
    }
}

impl Drop for OwnedThread {
    fn drop(&mut self) {
        // In a forked child the thread does not exist.
        let Some(thread) = self.thread.take().filter(|_| !self.is_of_parent()) else { return };
        // SAFETY: the call has no demands.
        if thread == unsafe { libc::pthread_self() } {
            detach(thread);
            return;
        }
        // SAFETY: the thread was neither joined nor detached, and is not this one.
        unsafe { libc::pthread_join(thread, ptr::null_mut()) };
    }
}

/// Returns the bytes that the C library takes from the stack of each thread: glibc has the static
/// thread-local storage of the program and its libraries there.
fn thread_storage_bytes() -> usize {
    // As the standard library does: it is private to glibc, and no other C library has it.
    const NAME: &CStr = c"__pthread_get_minstack";
    type LeastStack = unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize;
    // SAFETY: a name that ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, NAME.as_ptr()) };
    if found.is_null() {
        // A program without a dynamic glibc.
        return storage_segment_bytes();
    }
    // SAFETY: glibc's function of this name has this type.
    let least_stack = unsafe { std::mem::transmute::<*mut c_void, LeastStack>(found) };
    // SAFETY: it returns the storage, a page and `PTHREAD_STACK_MIN`, and does not use the
    // attributes.
    unsafe { least_stack(ptr::null()) }
}

/// Returns the bytes of the thread-local storage of the program and its libraries.
fn storage_segment_bytes() -> usize {
    unsafe extern "C" fn add(
        object: *mut libc::dl_phdr_info,
        _: usize,
        sum: *mut c_void,
    ) -> libc::c_int {
        // SAFETY: the C library passes a description that it keeps during the call.
        let object = unsafe { &*object };
        let count = usize::from(object.dlpi_phnum);
        // SAFETY: the description names as many headers.
        let headers = unsafe { std::slice::from_raw_parts(object.dlpi_phdr, count) };
        let storage = headers.iter().filter(|header| header.p_type == libc::PT_TLS);
        let bytes: u64 = storage.map(|header| header.p_memsz + header.p_align).sum();
        // SAFETY: the sum of the caller, which waits.
        unsafe { *sum.cast::<usize>() += bytes as usize };
        0
    }
    let mut sum = 0_usize;
    // SAFETY: `add` takes the sum as its argument.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut sum).cast()) };
    sum.next_multiple_of(PAGE_BYTES)
}

/// Creates a thread with a stack of `stack_bytes` bytes, which runs `run`.
fn create(run: Box<dyn FnOnce() + Send>, stack_bytes: usize) -> io::Result<libc::pthread_t> {
    let mut attributes = MaybeUninit::uninit();
    // SAFETY: memory for the attributes.
    answer(unsafe { libc::pthread_attr_init(attributes.as_mut_ptr()) })?;
    // SAFETY: initialized attributes.
    let sized =
        answer(unsafe { libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), stack_bytes) });
    let mut thread = MaybeUninit::uninit();
    let argument = Box::into_raw(Box::new(run));
    let created = sized.and_then(|()| {
        let (thread, attributes) = (thread.as_mut_ptr(), attributes.as_ptr());
        // SAFETY: memory for the thread, initialized attributes, and the argument that `run_boxed`
        // takes over.
        answer(unsafe { libc::pthread_create(thread, attributes, run_boxed, argument.cast()) })
    });
    // SAFETY: initialized attributes, which are not used any more.
    unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
    if let Err(error) = created {
        // SAFETY: made above, and no thread has it.
        drop(unsafe { Box::from_raw(argument) });
        return Err(error);
    }
    // SAFETY: the call succeeded, so it wrote the thread.
    Ok(unsafe { thread.assume_init() })
}

extern "C" fn run_boxed(argument: *mut c_void) -> *mut c_void {
    // SAFETY: `create` passes a box that this thread alone owns.
    let run = unsafe { Box::from_raw(argument.cast::<Box<dyn FnOnce() + Send>>()) };
    // The panic hook has reported it.
    let _ = catch_unwind(AssertUnwindSafe(run));
    ptr::null_mut()
}

fn detach(thread: libc::pthread_t) {
    // SAFETY: the thread was neither joined nor detached.
    unsafe { libc::pthread_detach(thread) };
}

fn answer(number: i32) -> io::Result<()> {
    if number == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(number)) }
}

/// Signals that an instruction of the thread raises. If blocked, such a signal kills the process.
const SYNCHRONOUS: [libc::c_int; 6] =
    [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// The signals that the thread blocked before; the drop restores them.
struct Blocked(libc::sigset_t);

/// Blocks all signals but the synchronous ones in the calling thread, and in the threads that it
/// starts meanwhile: process-directed signals are delivered to the threads of the program. (The C
/// library excludes the two signals that it uses itself.)
fn block_asynchronous() -> Blocked {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: a pointer to memory for a set.
    unsafe { libc::sigfillset(set.as_mut_ptr()) };
    for signal in SYNCHRONOUS {
        // SAFETY: the set filled above.
        unsafe { libc::sigdelset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: two sets; it cannot fail, because the operation is valid.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, set.as_ptr(), before.as_mut_ptr()) };
    // SAFETY: zeroed, which is an empty set, and then written by the C library.
    Blocked(unsafe { before.assume_init() })
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the previous set of this thread; the old one is not requested.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::mpsc;

    #[test]
    fn a_thread_has_its_name_and_is_joined_by_the_drop() {
        let (sender, receiver) = mpsc::channel();
        let thread = OwnedThread::start("a name of more than 15 bytes", move || {
            sender.send(rustix::thread::name()).unwrap();
        });
        drop(thread.unwrap());
        let name = receiver.try_recv().expect("the thread has ended").unwrap();
        assert_eq!(name.to_str(), Ok("a name of more "));
    }

    #[test]
    fn a_panic_ends_the_thread_alone() {
        let (sender, receiver) = mpsc::channel::<()>();
        let thread = OwnedThread::start("panics", move || {
            let _dropped_in_the_unwind = sender;
            std::panic::resume_unwind(Box::new(()));
        });
        drop(thread.unwrap());
        assert!(receiver.recv().is_err());
    }

    #[test]
    fn static_thread_local_storage_is_counted() {
        thread_local!(static STORAGE: Cell<[u8; 5000]> = const { Cell::new([1; 5000]) });
        assert_eq!(STORAGE.get()[4999], 1);
        assert!(storage_segment_bytes() > 5000);
        assert!(thread_storage_bytes() > 5000);
    }

    #[test]
    fn a_process_has_one_number() {
        let origins = [Origin::here(), Origin::here(), Origin::by_process()];
        assert_eq!(origins[0], origins[1]);
        assert!(origins.iter().all(|origin| !origin.is_forked()));
        let others = [Origin::Marked(0), Origin::Marked(u64::MAX), Origin::Process(0)];
        assert!(others.iter().all(|origin| origin.is_forked()));
    }

    #[test]
    fn the_current_cpu_is_one_of_the_possible() {
        assert!(current_cpu() < possible_cpus());
    }
}
