//! `bifolio-torture`: scenes of threads that use everything at once, one after the other.
//!
//! A scene is drawn from a seed (`scene.rs`); its threads work (`work.rs`) over simulated devices
//! (`device.rs`) and judge what they see by the history (`history.rs`). Afterwards, at rest, every
//! word is read once more, every word is durable after a sync, and the cache closes.

mod device;
mod history;
mod scene;
mod work;

use clap::Parser;
use history::Violation;
use scene::{CLASSES, Class, Scene, Target};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use work::Worker;

/// A scene without a call that returns for so long hangs.
const HANG: Duration = Duration::from_secs(60);

/// Threads that use all of bifolio at once, checked by what their history allows.
#[derive(Debug, Parser)]
struct Arguments {
    /// How long, seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The first seed; drawn if not given.
    #[arg(long)]
    seed: Option<u64>,
    /// Only scenes of this class.
    #[arg(long)]
    only: Option<Class>,
    /// How long a scene lasts, milliseconds.
    #[arg(long, default_value_t = 1500)]
    scene_ms: u64,
    /// Threads of a scene.
    #[arg(long, default_value_t = 4)]
    threads: usize,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let first = arguments.seed.unwrap_or_else(|| fastrand::u64(0..1 << 40));
    let begun = Instant::now();
    let (mut scenes, mut calls) = (0, 0);
    println!("torture: {} s, first seed {first}", arguments.seconds);
    while begun.elapsed() < Duration::from_secs(arguments.seconds) {
        let seed = first + scenes;
        let class = arguments.only.unwrap_or(CLASSES[seed as usize % CLASSES.len()]);
        let played = Scene::new(class, seed, arguments.threads)
            .map_err(|error| Violation(format!("the scene cannot be set up: {error:#}")))
            .and_then(|scene| play(&scene, Duration::from_millis(arguments.scene_ms)));
        match played {
            Ok(made) => calls += made,
            Err(Violation(told)) => {
                println!("torture: class {class:?}, seed {seed}\n{told}");
                println!("again: cargo x torture --only {class:?} --seed {seed}");
                return ExitCode::FAILURE;
            }
        }
        scenes += 1;
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "torture: {scenes} scenes, seeds {first} to {}, {calls} calls, {:.0} calls a second: clean",
        first + scenes.max(1) - 1,
        calls as f64 / seconds
    );
    ExitCode::SUCCESS
}

/// Lets the threads of a scene work, and judges what is left; the number of calls.
fn play(scene: &Scene, duration: Duration) -> Result<u64, Violation> {
    thread::scope(|scope| {
        let start = |number: usize| {
            let random = fastrand::Rng::with_seed(scene.seed.wrapping_mul(31) + number as u64);
            scope.spawn(move || {
                let outcome = Worker { scene, number, random }.run();
                if outcome.is_err() {
                    scene.ends.store(true, Ordering::Relaxed);
                }
                outcome
            })
        };
        let workers: Vec<_> = (0..scene.threads).map(start).collect();
        let watched = watch(scene, duration, || workers.iter().all(|worker| worker.is_finished()));
        let outcomes = workers.into_iter().map(|worker| match worker.join() {
            Ok(outcome) => outcome,
            Err(_) => Err(Violation("a thread panicked".into())),
        });
        outcomes.collect::<Result<Vec<_>, _>>()?;
        watched
    })?;
    rest(scene)?;
    Ok(scene.calls.load(Ordering::Relaxed))
}

/// Ends the scene in time; looks after hangs, the bound, and devices that are full for a while.
fn watch(scene: &Scene, duration: Duration, is_over: impl Fn() -> bool) -> Result<(), Violation> {
    let begun = Instant::now();
    let mut last = (scene.calls.load(Ordering::Relaxed), Instant::now());
    let mut turns = 0_u64;
    while !is_over() {
        thread::sleep(Duration::from_millis(10));
        turns += 1;
        if begun.elapsed() > duration {
            scene.ends.store(true, Ordering::Relaxed);
            scene.targets.iter().filter_map(|target| target.device.as_ref()).for_each(|d| d.heal());
        } else if scene.class == Class::Faults {
            for target in &scene.targets {
                let Some(device) = &target.device else { continue };
                device.set_full(turns / 20 % 5 == 1);
                device.set_hung(turns / 10 % 13 == 5);
            }
        }
        let stats = scene.cache.stats();
        if stats.used_bytes > stats.bound_bytes.max(scene.memory_bytes * 2) {
            let told = format!("{} bytes used, {} allowed", stats.used_bytes, stats.bound_bytes);
            return Err(Violation(told));
        }
        let calls = scene.calls.load(Ordering::Relaxed);
        if calls != last.0 {
            last = (calls, Instant::now());
        } else if last.1.elapsed() > HANG {
            println!(
                "torture: class {:?}, seed {}: no call returned for {HANG:?}; {:?}",
                scene.class,
                scene.seed,
                scene.cache.stats()
            );
            std::process::abort();
        }
    }
    Ok(())
}

/// Everything is at rest: every word is what the history says, and durable after a sync.
fn rest(scene: &Scene) -> Result<(), Violation> {
    let me = scene.threads;
    scene.clock.begin_call(me);
    for target in &scene.targets {
        let found = target.handles.iter().find_map(|slot| slot.lock().expect("no panic").clone());
        let Some(file) = found else { continue };
        let begun = scene.clock.tick();
        let mut bytes = vec![0xAA; file.len() as usize];
        file.read_exact_at(&mut bytes, 0)
            .map_err(|error| Violation(format!("the last read failed: {error}")))?;
        target.history.check("the last read", whole_words(&bytes), 0, begun)?;
        // A sync tells once of what failed before.
        let synced = file.sync_data();
        if target.has_failed.load(Ordering::Relaxed) || scene.may_fail() {
            drop(synced);
        } else {
            synced.map_err(|error| Violation(format!("the last sync failed: {error}")))?;
        }
        file.sync_data().map_err(|error| Violation(format!("a healed sync failed: {error}")))?;
        if let Some(device) = &target.device {
            let durable = device.durable(0, bytes.len());
            let begun = scene.clock.tick();
            target.history.check("the last power cut", whole_words(&durable), 0, begun)?;
            if device.live(0, bytes.len()) != bytes {
                return Err(Violation(format!("{file:?}: the device differs from the last read")));
            }
        }
    }
    scene.clock.end_call(me);
    for target in &scene.targets {
        close(target);
    }
    let dirty = scene.cache.stats().dirty_bytes;
    if dirty > 0 {
        return Err(Violation(format!("{dirty} bytes are dirty at rest, after a sync")));
    }
    scene.cache.close().map_err(|error| Violation(format!("close failed: {error}")))
}

fn close(target: &Target) {
    for slot in &target.handles {
        slot.lock().expect("no panic").take();
    }
}

fn whole_words(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len() / 8 * 8]
}
