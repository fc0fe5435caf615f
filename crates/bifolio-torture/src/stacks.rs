//! Prints the stacks of all threads of a program that hangs and is about to end.
//!
//! Each thread is sent a signal, whose handler captures the stack; the caller, a thread that does
//! not hang, prints it. A thread that blocks signals, as those of the library do, or waits in the
//! kernel for something that no signal interrupts, has no stack to show: the name of the kernel's
//! function stands for it.
//!
//! # Safety
//! The handler allocates, which a handler must not: it may wait for a lock of the thread that it
//! interrupted, forever. The caller gives up after a while, and [`die_within`] ends the program
//! that hangs a second time. A handler has the signature that `sigaction` requires, and lives as
//! long as the program.
#![allow(unsafe_code)]

use std::backtrace::Backtrace;
use std::fs;
use std::mem;
use std::ptr;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// Time that a thread has to capture its stack.
const PATIENCE: Duration = Duration::from_millis(500);
/// Frames with one of these in their name are printed, unless they have one of the others.
const SHOWN: [&str; 2] = ["bifolio", "torture"];
const HIDDEN: [&str; 6] =
    ["stacks::capture", "drop_in_place", "::drop<", "catch_unwind", "call_once", "do_call"];

/// Number of the thread that was interrupted last, and its stack.
static CAPTURED: Mutex<Option<(i32, Backtrace)>> = Mutex::new(None);

/// Ends the program after this time, even if no thread of it can run any more.
pub fn die_within(time: Duration) {
    // SAFETY: a number is given; the signal has its default action, which ends the program.
    unsafe { libc::alarm(time.as_secs() as libc::c_uint) };
}

/// Prints the stack of each other thread that runs code of the library or of this program.
pub fn print() {
    install();
    let own = own_number();
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return };
    for thread in threads.flatten() {
        let Ok(number) = thread.file_name().to_string_lossy().parse::<i32>() else { continue };
        let read = |name| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        if number == own {
            continue;
        }
        let name = read("comm");
        match stack_of(number) {
            Some(frames) if frames.is_empty() => {}
            Some(frames) => println!("thread {}:\n    {}", name.trim(), frames.join("\n    ")),
            None => println!("thread {}: no stack, in {}", name.trim(), read("wchan").trim()),
        }
    }
}

/// Returns the names of the frames of a thread, if it answers in time.
fn stack_of(number: i32) -> Option<Vec<String>> {
    let process = std::process::id() as libc::c_int;
    // SAFETY: numbers are given; at worst there is no such thread any more.
    unsafe { libc::syscall(libc::SYS_tgkill, process, number, libc::SIGUSR1) };
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let captured = CAPTURED.lock().ok()?.take();
        // A thread that was late answers for another.
        if let Some((_, stack)) = captured.filter(|(from, _)| *from == number) {
            return Some(frames(&stack.to_string()));
        }
        thread::sleep(Duration::from_millis(1));
    }
    None
}

/// Returns the lines of a printed stack that name functions of this workspace.
fn frames(stack: &str) -> Vec<String> {
    let names = stack.lines().map(str::trim).filter(|line| !line.starts_with("at "));
    let shown = names.filter(|line| {
        let name = line.split_once(": ").map_or(*line, |(_, name)| name);
        let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        has(&SHOWN) && !has(&HIDDEN)
    });
    shown.map(str::to_owned).collect()
}

/// Installs the handler.
fn install() {
    // SAFETY: zeros are a valid value: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = capture as extern "C" fn(libc::c_int) as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the action is valid, and the old one is not asked for.
    unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut()) };
}

/// The handler: captures the stack of the thread that it interrupts.
extern "C" fn capture(_: libc::c_int) {
    let stack = Backtrace::force_capture();
    if let Ok(mut captured) = CAPTURED.try_lock() {
        *captured = Some((own_number(), stack));
    }
}

/// Returns the number of the calling thread.
fn own_number() -> i32 {
    // SAFETY: no arguments.
    unsafe { libc::gettid() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[inline(never)]
    fn waits_in_torture(number: &mpsc::Sender<i32>, end: &mpsc::Receiver<()>) {
        number.send(own_number()).expect("the test waits");
        let _ = end.recv();
    }

    #[test]
    fn the_stack_of_a_thread_that_waits_names_its_functions() {
        install();
        let (sender, number) = mpsc::channel();
        let (end, is_over) = mpsc::channel();
        let thread = thread::spawn(move || waits_in_torture(&sender, &is_over));
        let number = number.recv().expect("the thread sends");
        // On a busy machine it may be late.
        let frames = (0..60).find_map(|_| stack_of(number)).expect("a stack");
        drop(end);
        thread.join().expect("no panic");
        assert!(frames.iter().any(|frame| frame.contains("waits_in_torture")), "{frames:?}");
        assert!(!frames.iter().any(|frame| frame.contains("stacks::capture")), "{frames:?}");
    }
}
