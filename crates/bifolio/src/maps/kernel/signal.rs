//! Handles SIGBUS in the thread that raised it.
//!
//! A thread that touches a missing page of a map installs it in its own signal handler
//! (`maps/faults/in_thread.rs`). A SIGBUS from elsewhere goes to the handler that was installed
//! before, or kills the process as it would without the cache.
//!
//! The handler uses no alternate stack (`SA_ONSTACK`): those of threads have a few KiB, enough to
//! report a stack overflow, whereas serving a fault may reclaim, read and wait. A fault on a map
//! comes from a load or store that had stack left. A runtime whose threads have tiny stacks, such
//! as Go, must not have its faults served in the thread.
//!
//! `SA_NODEFER`: serving may raise a fault of its own, on another map. `SA_RESTART`: a SIGBUS sent
//! by a process does not interrupt system calls.
//!
//! # Safety
//! Installs a signal handler, and calls the previous one as the kernel would have.
#![allow(unsafe_code)]

use std::io;
use std::mem::{MaybeUninit, transmute};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Serves a fault at an address. Returns `true` if the access should be retried. The arguments are
/// the address of the byte and `true` for a store (always `false` on processors whose signal frame
/// does not show it simply).
pub(crate) type Serve = fn(address: usize, is_write: bool) -> bool;

/// State of the handler; set before it is installed, and never changed.
#[derive(Clone, Copy)]
struct Installed {
    serve: Serve,
    own: libc::sigaction,
    previous: libc::sigaction,
}

// Read by the handler: once set, that is a plain load.
static INSTALLED: OnceLock<Installed> = OnceLock::new();
static INSTALLING: Mutex<()> = Mutex::new(());

/// Installs a handler that calls `serve` for each access to a page that the kernel cannot provide,
/// in the thread that made the access. For the whole process and permanently; a second call changes
/// nothing.
///
/// `serve` runs in a signal handler, on top of any code that accesses such memory: it may wait and
/// do I/O, but must not take a lock that such code may hold.
pub(crate) fn install(serve: Serve) -> io::Result<()> {
    let _guard = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if INSTALLED.get().is_some() {
        return Ok(());
    }
    let previous = exchange(None)?;
    // SAFETY: all zeros is a valid `sigaction`: the default action, an empty mask.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handle as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_RESTART;
    INSTALLED.get_or_init(|| Installed { serve, own: action, previous });
    exchange(Some(&action)).map(drop)
}

/// Returns `true` if the calling thread blocks SIGBUS: then a fault kills the process even if a
/// handler would serve it.
pub(crate) fn is_blocked() -> bool {
    let mut blocked = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: without a new set the call only stores the old one, to memory for a set.
    let answer =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), blocked.as_mut_ptr()) };
    // SAFETY: a set that was zeroed, and then written by the C library.
    answer == 0 && unsafe { libc::sigismember(blocked.as_ptr(), libc::SIGBUS) } == 1
}

/// Installs `action`, if any, for SIGBUS. Returns the previous one.
fn exchange(action: Option<&libc::sigaction>) -> io::Result<libc::sigaction> {
    let mut previous = MaybeUninit::zeroed();
    let action = action.map_or(ptr::null(), ptr::from_ref);
    // SAFETY: both are null or point to a `sigaction`; the only handlers ever passed are `handle`
    // and those that were installed before.
    let answer = unsafe { libc::sigaction(libc::SIGBUS, action, previous.as_mut_ptr()) };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed, which is valid, and then written by the kernel.
    Ok(unsafe { previous.assume_init() })
}

extern "C" fn handle(
    signal: libc::c_int,
    information: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let Some(installed) = INSTALLED.get() else { return };
    // SAFETY: returns the location of this thread's error number.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: valid for as long as the thread lives.
    let error_number = unsafe { *place };
    // SAFETY: the kernel passes a signal description to a handler with SA_SIGINFO; copied.
    let told = unsafe { *information };
    // SAFETY: SIGBUS has an address; it is not used if the signal was sent by a process.
    let address = unsafe { told.si_addr() }.addr();
    let is_ours = told.si_code == libc::BUS_ADRERR;
    let is_served = is_ours && (installed.serve)(address, is_write(context));
    if !is_served {
        // SAFETY: the arguments of this call.
        unsafe { pass_on(&installed.previous, signal, information, context) };
        // A handler such as that of Rust's standard library uninstalls itself and expects the fault
        // to be raised again. A sent signal is not, and faults must be served as before.
        let is_sent = told.si_code <= 0;
        if is_sent && installed.previous.sa_sigaction != libc::SIG_DFL {
            let _ = exchange(Some(&installed.own));
        }
    }
    // SAFETY: as above.
    unsafe { *place = error_number };
}

/// Does what would have happened without this handler.
///
/// # Safety
/// The arguments must be those of a SIGBUS handler call.
unsafe fn pass_on(
    previous: &libc::sigaction,
    signal: libc::c_int,
    information: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel's description of the signal.
    let is_sent = unsafe { (*information).si_code } <= 0;
    match previous.sa_sigaction {
        libc::SIG_IGN if is_sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // A fault is raised again on return, and the kernel does not allow ignoring it.
            let mut action = *previous;
            action.sa_sigaction = libc::SIG_DFL;
            let _ = exchange(Some(&action));
            if is_sent {
                // SAFETY: sends a signal to this thread; its default action ends the process.
                unsafe { libc::raise(signal) };
            }
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: installed with SA_SIGINFO, so it is a function of this kind.
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { transmute(handler) };
            handler(signal, information, context);
        }
        handler => {
            // SAFETY: installed without SA_SIGINFO, so it is a function of this kind.
            let handler: extern "C" fn(libc::c_int) = unsafe { transmute(handler) };
            handler(signal);
        }
    }
}

/// Returns `true` if the fault was a store.
#[cfg(target_arch = "x86_64")]
fn is_write(context: *mut libc::c_void) -> bool {
    /// Bit of the processor's page fault error code.
    const STORE: i64 = 1 << 1;
    // SAFETY: the kernel passes the thread's context to a handler with SA_SIGINFO.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    context.uc_mcontext.gregs[libc::REG_ERR as usize] & STORE != 0
}

/// Returns `false`: the context does not tell if the fault was a store.
#[cfg(not(target_arch = "x86_64"))]
fn is_write(_context: *mut libc::c_void) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maps::kernel::userfault::tests::Scratch;
    use crate::sys::memory::PAGE_BYTES;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, ExitStatus};
    use std::sync::atomic::{AtomicUsize, Ordering};

    const CHILD: &str = "BIFOLIO_SIGNAL_TEST_CHILD";

    /// Runs the test `name` again, alone in a child process, because a handler is permanent.
    /// Returns the exit status of the child, or `None` in the child itself.
    fn in_child(name: &str) -> Option<ExitStatus> {
        if std::env::var_os(CHILD).is_some() {
            let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
            rustix::process::setrlimit(rustix::process::Resource::Core, none).unwrap();
            return None;
        }
        let name = format!("{}::{name}", module_path!().split_once("::").unwrap().1);
        let output = Command::new(std::env::current_exe().unwrap())
            .args([&name, "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("running 1 test"), "{text}");
        println!("{text}{}", String::from_utf8_lossy(&output.stderr));
        Some(output.status)
    }

    static REGION: OnceLock<Scratch> = OnceLock::new();
    static FAULTS: AtomicUsize = AtomicUsize::new(0);
    static STORES: AtomicUsize = AtomicUsize::new(0);
    static OTHERS: AtomicUsize = AtomicUsize::new(0);

    /// Returns a region of four pages; `None` where regions are not supported.
    fn region() -> Option<&'static Scratch> {
        let scratch = Scratch::with(4, true, &[])?;
        Some(REGION.get_or_init(|| scratch))
    }

    /// Installs the page of an address in the region, except the last page; serving the third page
    /// touches the second.
    fn serve(address: usize, is_write: bool) -> bool {
        let scratch = REGION.get().unwrap();
        let page = address.wrapping_sub(scratch.at(0).addr()) / PAGE_BYTES;
        if page >= 3 {
            return false;
        }
        FAULTS.fetch_add(1, Ordering::Relaxed);
        STORES.fetch_add(usize::from(is_write), Ordering::Relaxed);
        let second = if page == 2 { scratch.load(PAGE_BYTES) } else { 0 };
        let is_there = scratch.install(page, &[page as u8 + 1 + second], false).1.is_ok();
        set_error_number(libc::EXDEV);
        is_there
    }

    fn set_error_number(number: libc::c_int) {
        // SAFETY: returns the location of this thread's error number.
        let place = unsafe { libc::__errno_location() };
        // SAFETY: valid for as long as the thread lives.
        unsafe { *place = number };
    }

    #[test]
    fn a_missing_page_is_served_by_the_thread_that_touches_it() {
        if let Some(status) = in_child("a_missing_page_is_served_by_the_thread_that_touches_it") {
            return assert!(status.success(), "{status}");
        }
        let Some(scratch) = region() else { return };
        install(serve).unwrap();
        install(|_, _| false).unwrap();
        let counts = || [FAULTS.load(Ordering::Relaxed), STORES.load(Ordering::Relaxed)];
        set_error_number(libc::EILSEQ);
        let byte = scratch.load(77);
        let error = io::Error::last_os_error();
        assert_eq!(byte, 1);
        assert_eq!(error.raw_os_error(), Some(libc::EILSEQ), "errno was not preserved");
        assert_eq!(counts(), [1, 0]);
        scratch.store(78, 9);
        assert_eq!(counts(), [1, 0], "the page is present");
        // A fault raised while serving a fault.
        scratch.store(2 * PAGE_BYTES, 8);
        let told = usize::from(cfg!(target_arch = "x86_64"));
        assert_eq!(counts(), [3, told]);
        let bytes = [0, 1].map(|offset| scratch.load(2 * PAGE_BYTES + offset));
        assert_eq!(bytes, [8, 3 + 2]);
    }

    #[test]
    fn a_sent_signal_kills_the_process() {
        if let Some(status) = in_child("a_sent_signal_kills_the_process") {
            return assert!(matches!(status.signal(), Some(libc::SIGBUS)), "{status}");
        }
        set_previous(libc::SIG_DFL, 0);
        install(|_, _| true).unwrap();
        // SAFETY: ends this process.
        unsafe { libc::raise(libc::SIGBUS) };
        unreachable!("the signal was not delivered");
    }

    #[test]
    fn the_previous_handler_gets_unserved_signals() {
        if let Some(status) = in_child("the_previous_handler_gets_unserved_signals") {
            return assert!(status.success(), "{status}");
        }
        let Some(scratch) = region() else { return };
        set_previous(previous_handler as *const () as usize, libc::SA_SIGINFO);
        install(serve).unwrap();
        assert_eq!(scratch.load(0), 1);
        assert_eq!(OTHERS.load(Ordering::Relaxed), 0, "a served fault is not passed on");
        assert_eq!(scratch.load(3 * PAGE_BYTES + 5), 66);
        assert_eq!(OTHERS.load(Ordering::Relaxed), 1);
        // SAFETY: a signal that the previous handler handles.
        unsafe { libc::raise(libc::SIGBUS) };
        assert_eq!(OTHERS.load(Ordering::Relaxed), 2, "a sent signal is passed on");
        assert_eq!(FAULTS.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_sent_signal_does_not_uninstall_the_handler() {
        if let Some(status) = in_child("a_sent_signal_does_not_uninstall_the_handler") {
            return assert!(status.success(), "{status}");
        }
        let Some(scratch) = region() else { return };
        set_previous(vanishing_handler as *const () as usize, libc::SA_SIGINFO);
        install(serve).unwrap();
        for page in 0..3 {
            // SAFETY: a signal that the previous handler handles.
            unsafe { libc::raise(libc::SIGBUS) };
            assert_eq!(scratch.load(page * PAGE_BYTES), [1, 2, 5][page]);
        }
        assert_eq!(OTHERS.load(Ordering::Relaxed), 3);
    }

    /// A handler like that of the standard library: the next signal kills.
    extern "C" fn vanishing_handler(
        _signal: libc::c_int,
        _information: *mut libc::siginfo_t,
        _context: *mut libc::c_void,
    ) {
        OTHERS.fetch_add(1, Ordering::Relaxed);
        set_previous(libc::SIG_DFL, 0);
    }

    #[test]
    fn previous_plain_and_ignoring_handlers_are_respected() {
        if let Some(status) = in_child("previous_plain_and_ignoring_handlers_are_respected") {
            return assert!(status.success(), "{status}");
        }
        set_previous(libc::SIG_IGN, 0);
        install(|_, _| true).unwrap();
        // SAFETY: a signal that is ignored.
        unsafe { libc::raise(libc::SIGBUS) };
        let mut previous = exchange(None).unwrap();
        assert_eq!(previous.sa_sigaction, handle as *const () as usize, "still installed");
        previous.sa_sigaction = plain_handler as *const () as usize;
        previous.sa_flags = 0;
        let mut information: libc::siginfo_t = zeroed_information();
        // SAFETY: a signal description, and a handler that takes no context.
        unsafe { pass_on(&previous, libc::SIGBUS, &raw mut information, ptr::null_mut()) };
        assert_eq!(OTHERS.load(Ordering::Relaxed), 10);
    }

    fn zeroed_information() -> libc::siginfo_t {
        // SAFETY: all zeros is a valid description: a signal that was sent.
        unsafe { MaybeUninit::zeroed().assume_init() }
    }

    fn set_previous(handler: usize, flags: libc::c_int) {
        let mut action = exchange(None).unwrap();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        exchange(Some(&action)).unwrap();
    }

    extern "C" fn plain_handler(signal: libc::c_int) {
        OTHERS.fetch_add(usize::from(signal == libc::SIGBUS) * 10, Ordering::Relaxed);
    }

    /// Installs the page itself.
    extern "C" fn previous_handler(
        _signal: libc::c_int,
        information: *mut libc::siginfo_t,
        _context: *mut libc::c_void,
    ) {
        OTHERS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the kernel's signal description.
        if unsafe { (*information).si_code } == libc::BUS_ADRERR {
            REGION.get().unwrap().install(3, &[66], false).1.unwrap();
        }
    }
}
