//! Signals of the process: the cache's threads take none, and a handler that touches a map inside a
//! call of the library ends the process instead of hanging it.
//!
//! # Safety
//! Handlers touch one byte of a map that lives as long as the process.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::thread;

use bifolio::ReadRequest;
use bifolio::backing::{Backing, IoBuf, IoBufMut};
use bifolio_testing::Gate;

use crate::setup::{Way, load, log_to_stderr, run_child, store};
use crate::support::{PAGE, read_all, wait_until, writable};

const VARIABLE: &str = "BIFOLIO_TEST_SIGNALS";
/// Seconds after which a process counts as hung and is killed by SIGALRM.
const PATIENCE: u32 = 30;

/// Returns the name and the blocked signals of each thread of the process.
fn threads() -> Vec<(String, u64)> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let threads = tasks.filter_map(|task| {
        let status = fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        let value = |name| status.lines().find_map(|line: &str| line.strip_prefix(name));
        let blocked = u64::from_str_radix(value("SigBlk:")?.trim(), 16).ok()?;
        Some((value("Name:")?.trim().to_owned(), blocked))
    });
    threads.collect()
}

fn is_blocked(mask: u64, signal: i32) -> bool {
    mask >> (signal - 1) & 1 == 1
}

#[test]
fn threads_of_the_cache_block_asynchronous_signals_only() {
    let mask_of_this_thread = || {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        status.lines().find(|line| line.starts_with("SigBlk:")).unwrap().to_owned()
    };
    let before = mask_of_this_thread();
    for way in Way::whole() {
        let cache = way.swapping(512 << 10);
        let file = way.memory_file(&cache, 400 * PAGE);
        let mut map = file.map_mut(0..file.len()).unwrap();
        for page in 0..400 {
            store(map.as_mut_ptr(), page * PAGE, b"stored");
        }
        assert_eq!(load(map.as_ptr(), 0..6), *b"stored");
        let directory = crate::support::directory();
        let (path, _) = crate::support::random_file(&directory, "file", 200 * PAGE as usize);
        let other = cache.open(&path, &writable()).unwrap();
        read_all(&other);
        other.write_all_at(b"dirty", 0).unwrap();
        let ours: Vec<_> = threads().into_iter().filter(|it| it.0.starts_with("bifolio")).collect();
        for kind in ["bifolio-fault", "bifolio-swap", "bifolio-recl", "bifolio-flush"] {
            let is_there = ours.iter().any(|(name, _)| name.starts_with(kind));
            assert!(is_there || kind == "bifolio-fault", "{kind} among {ours:?}");
        }
        for (name, mask) in &ours {
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1, libc::SIGCHLD, libc::SIGALRM]
            {
                assert!(is_blocked(*mask, signal), "{name} takes signal {signal}: {mask:x}");
            }
            for signal in [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE] {
                assert!(!is_blocked(*mask, signal), "{name} dies of signal {signal}: {mask:x}");
            }
        }
    }
    assert_eq!(mask_of_this_thread(), before, "the mask of the caller");
}

thread_local! {
    /// Set for the thread that is interrupted.
    static IS_READER: Cell<bool> = const { Cell::new(false) };
}

/// Zeros that the reader gets once another thread waits at the gate, which never opens.
#[derive(Debug)]
struct Gated {
    gate: Gate,
    position: AtomicU64,
    /// Calls that have ended, or wait at the gate.
    calls: AtomicU64,
}

impl Backing for Gated {
    fn read_at(&self, target: &mut IoBufMut<'_>, position: u64) -> io::Result<usize> {
        let length = target.len();
        target.copy_from_slice(0, &vec![0; length]);
        let is_reader = IS_READER.get();
        if is_reader {
            // It leaves the other one to another thread.
            self.gate.wait_for_arrivals(1);
        } else {
            self.position.store(position, Ordering::Relaxed);
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        if !is_reader {
            self.gate.pass();
        }
        Ok(length)
    }

    fn write_at(&self, source: &IoBuf<'_>, _position: u64) -> io::Result<usize> {
        Ok(source.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(64 * PAGE)
    }

    fn set_len(&self, _length: u64) -> io::Result<()> {
        Ok(())
    }

    fn describe(&self) -> String {
        "gated".into()
    }
}

static TARGET: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn touch_target(_signal: libc::c_int) {
    let target = TARGET.load(Ordering::Relaxed);
    // SAFETY: a byte of a map that lives.
    let _ = unsafe { target.read_volatile() };
}

/// Interrupts a thread that waits for a transfer; the handler touches the page that is read.
fn touch_in_a_handler(way: Way) {
    log_to_stderr();
    let cache = way.builder(1 << 20).readahead_max(0).build().unwrap();
    let backing = Arc::new(Gated {
        gate: Gate::new(),
        position: AtomicU64::new(u64::MAX),
        calls: AtomicU64::new(0),
    });
    let file = cache.open_backing(backing.clone(), &way.options()).unwrap();
    let map = file.map(0..file.len()).unwrap();
    // SAFETY: all zeros is a valid action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = touch_target as *const () as usize;
    // SAFETY: a handler that only touches memory.
    let answer = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) };
    assert_eq!(answer, 0);
    let reader = AtomicI32::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            IS_READER.set(true);
            reader.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Relaxed);
            let mut buffers = [[0_u8; 100]; 2];
            let [first, second] = &mut buffers;
            let mut requests =
                [ReadRequest::new(first, 5 * PAGE), ReadRequest::new(second, 40 * PAGE)];
            file.read_many(&mut requests).unwrap();
            println!("it went on");
        });
        backing.gate.wait_for_arrivals(1);
        wait_until("the reader waits for a transfer", || {
            let task = format!("/proc/self/task/{}/stat", reader.load(Ordering::Relaxed));
            let stat = fs::read_to_string(task).unwrap();
            let is_asleep = stat.rsplit_once(") ").unwrap().1.starts_with('S');
            backing.calls.load(Ordering::Relaxed) == 2 && is_asleep
        });
        let position = backing.position.load(Ordering::Relaxed);
        TARGET.store(map.as_ptr().wrapping_add(position as usize).cast_mut(), Ordering::Relaxed);
        let (process, thread) = (std::process::id(), reader.load(Ordering::Relaxed));
        // SAFETY: a signal that has a handler, to a thread of this process.
        unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1) };
    });
}

#[test]
fn a_handler_that_faults_inside_a_call_dies_and_does_not_hang() {
    const NAME: &str = "signals::a_handler_that_faults_inside_a_call_dies_and_does_not_hang";
    let ways = Way::whole();
    if let Ok(number) = std::env::var(VARIABLE) {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(PATIENCE) };
        return touch_in_a_handler(ways[number.parse::<usize>().unwrap()]);
    }
    for (number, way) in ways.iter().enumerate() {
        let output = run_child(NAME, VARIABLE, &number.to_string());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{way:?}: {errors}");
        assert!(errors.contains("inside a call of the cache"), "{way:?}: {errors}");
    }
}
