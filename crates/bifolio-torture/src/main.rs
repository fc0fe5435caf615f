//! `bifolio-torture`: runs scenes of threads that use the whole API, one after the other.
//!
//! A scene is drawn from a seed (`scene.rs`); its threads work (`work.rs`) over simulated devices
//! (`device.rs`) and judge each result by the history (`history.rs`). Afterwards, at rest, every
//! word is read once more, every word is durable after a sync, and the cache closes.
//!
//! Scenes of kills differ (`kills.rs`): a child process (`victim.rs`) works on real files, keeps a
//! journal (`journal.rs`), and is killed. The exerciser (`exerciser.rs`) has one thread and a model
//! instead of a history, and so have cases whose storage fails at the n-th call (`upsets.rs`).
//! Scenes of write gates (`gates.rs`) have a simulated log, and words that hold LSNs; those of kept
//! files (`kept.rs`) have real files, and words that hold the number of a change. Scenes of drops
//! (`drops`) drop the futures of asynchronous calls on real files. Scenes of power cuts
//! (`power_files.rs`) have a file system of the kernel over a device that loses what was not
//! flushed; they need root, and run only where asked for.
//!
//! A scene that makes no progress ends the program (`watchdog.rs`). A run without any work is a
//! failure, and so is a class whose scenes no longer meet what they are for (`met.rs`).

mod advice;
mod async_calls;
mod closes;
mod codec;
mod deaths;
mod device;
mod drops;
mod exerciser;
mod gates;
mod history;
mod journal;
mod kept;
mod kills;
mod looks;
mod maps;
mod meeting;
mod memory;
mod met;
mod power_files;
mod scene;
mod shares;
mod stacks;
mod upsets;
mod victim;
#[allow(dead_code)]
#[path = "../../bifolio/examples/wal_btree.rs"]
mod wal_btree;
mod watchdog;
mod work;

use clap::Parser;
use history::Violation;
use met::Counts;
use scene::{CLASSES, Class, Scene, Target};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use watchdog::Seen;
use work::Worker;

/// Calls of other threads during which a device hangs.
const FREE_CALLS: u64 = 200;

/// Threads that use the whole API of bifolio, checked by their histories.
#[derive(Debug, Parser)]
struct Arguments {
    /// Duration, seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The first seed; random if not given.
    #[arg(long)]
    seed: Option<u64>,
    /// Only scenes of these classes, alternating.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Class>,
    /// No scenes of these classes.
    #[arg(long, value_delimiter = ',')]
    without: Vec<Class>,
    /// Duration of a scene, milliseconds.
    #[arg(long, default_value_t = 1500)]
    scene_ms: u64,
    /// Threads of a scene.
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Seconds without progress, in any part of a scene, after which it counts as hung.
    #[arg(long, default_value_t = 60)]
    hang_seconds: u64,
    /// Name each scene before it begins.
    #[arg(long)]
    trace: bool,
    /// Maximum number of kills.
    #[arg(long, default_value_t = u64::MAX)]
    kills: u64,
    /// Maximum number of power cuts.
    #[arg(long, default_value_t = u64::MAX)]
    cuts: u64,
    /// The devices of scenes of power cuts forget flushes: for the test of these scenes.
    #[arg(long, hide = true)]
    forget_flushes: bool,
    /// Maximum number of operations of the exerciser.
    #[arg(long, default_value_t = u64::MAX)]
    operations: u64,
    /// Maximum number of writes with an LSN.
    #[arg(long, default_value_t = u64::MAX)]
    gated_writes: u64,
    /// Maximum number of futures that scenes of drops drop.
    #[arg(long, default_value_t = u64::MAX)]
    dropped_futures: u64,
    /// Only these operations of the exerciser's first seed.
    #[arg(long, value_delimiter = ',')]
    keep: Vec<usize>,
    /// Hang in this part of a scene: for the test of the watchdog.
    #[arg(long, hide = true)]
    stall: Option<String>,
    /// The folder of a scene of kills, in its child.
    #[arg(long, hide = true)]
    victim: Option<PathBuf>,
    /// The child loses its power instead of being killed.
    #[arg(long, hide = true)]
    loses_power: bool,
    /// The folder of a tree, in a child.
    #[arg(long, hide = true)]
    tree: Option<PathBuf>,
    /// Number of the child.
    #[arg(long, hide = true, default_value_t = 0)]
    session: u64,
}

impl Arguments {
    /// Returns the classes to run, in order.
    fn classes(&self) -> Vec<Class> {
        let all = if self.only.is_empty() { &CLASSES[..] } else { &self.only };
        let is_wanted = |class: &Class| {
            !self.without.contains(class) && (*class != Class::Maps || scene::can_map())
        };
        all.iter().copied().filter(is_wanted).collect()
    }
}

/// The work of all scenes.
#[derive(Debug, Default)]
struct Tally {
    scenes: u64,
    calls: u64,
    operations: u64,
    kills: kills::Tally,
    power: power_files::Tally,
    upsets: upsets::Tally,
    gates: gates::Tally,
    drops: drops::Tally,
    kept: kept::Tally,
    met: met::Met,
}

impl Tally {
    /// Returns `true` if the requested amount of work is done.
    fn is_enough(&self, arguments: &Arguments) -> bool {
        self.kills.kills >= arguments.kills
            || self.power.cuts >= arguments.cuts
            || self.operations >= arguments.operations
            || self.gates.writes >= arguments.gated_writes
            || self.drops.dropped() >= arguments.dropped_futures
            || !arguments.keep.is_empty() && self.scenes > 0
    }

    /// Returns `true` if nothing was done at all.
    fn is_empty(&self) -> bool {
        let kills = self.kills.kills + self.kills.ends + self.power.cuts;
        let others = self.upsets.steps + self.gates.writes + self.drops.calls + self.kept.opens;
        self.calls + self.operations + kills + others == 0
    }
}

fn main() -> ExitCode {
    memory::keep_no_freed_memory();
    let arguments = Arguments::parse();
    let first = arguments.seed.unwrap_or_else(|| fastrand::u64(0..1 << 40));
    if let Some(lived) = live(&arguments, first) {
        return match lived {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                let session = arguments.session;
                eprintln!("torture: the child of seed {first}, session {session}: {error:#}");
                ExitCode::FAILURE
            }
        };
    }
    deaths::watch();
    watchdog::start(Duration::from_secs(arguments.hang_seconds), arguments.stall.clone());
    let classes = arguments.classes();
    let begun = Instant::now();
    let mut tally = Tally::default();
    println!("torture: {} s, first seed {first}", arguments.seconds);
    while begun.elapsed() < Duration::from_secs(arguments.seconds) && !tally.is_enough(&arguments) {
        let seed = first + tally.scenes;
        let Some(class) = classes.get(seed as usize % classes.len().max(1)).copied() else {
            println!("torture: no class is left");
            return ExitCode::FAILURE;
        };
        deaths::note(class, seed);
        let play = || play_one(class, seed, &arguments, &mut tally);
        let played = catch_unwind(AssertUnwindSafe(play));
        if let Err(Violation(told)) = played.unwrap_or_else(|_| Err(Violation("a panic".into()))) {
            println!("torture: class {}, seed {seed}\n{told}", class.word());
            println!("again: cargo x torture --only {} --seed {seed}", class.word());
            return ExitCode::FAILURE;
        }
        tally.scenes += 1;
    }
    tell(first, &tally, begun.elapsed());
    if tally.is_empty() {
        println!("torture: nothing was done, so nothing was checked");
        return ExitCode::FAILURE;
    }
    if let Err(Violation(told)) = tally.met.check() {
        println!("torture: {told}: is that still what they are for (met.rs)?");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Does the work of a child, if this process is one.
fn live(arguments: &Arguments, seed: u64) -> Option<anyhow::Result<()>> {
    if let Some(directory) = &arguments.tree {
        return Some(wal_btree::commit_until_killed(directory).map_err(Into::into));
    }
    let (directory, session) = (arguments.victim.as_ref()?, arguments.session);
    Some(victim::live(directory, seed, session, arguments.loses_power))
}

/// Runs one scene.
fn play_one(
    class: Class,
    seed: u64,
    arguments: &Arguments,
    tally: &mut Tally,
) -> Result<(), Violation> {
    let duration = Duration::from_millis(arguments.scene_ms);
    if arguments.trace {
        println!("scene: {} {seed}", class.word());
    }
    watchdog::enter("the work");
    match class {
        Class::Kills => {
            let hang = Duration::from_secs(arguments.hang_seconds);
            let kills_max = arguments.kills - tally.kills.kills;
            tally.kills.add(kills::play(seed, duration, kills_max, hang)?);
        }
        Class::PowerFiles => {
            let cuts_max = arguments.cuts - tally.power.cuts;
            let (hang, lies) =
                (Duration::from_secs(arguments.hang_seconds), arguments.forget_flushes);
            tally.power.add(power_files::play(seed, cuts_max, hang, lies)?);
        }
        Class::Exerciser => tally.operations += exerciser::play(seed, &arguments.keep)?,
        Class::Upsets => tally.upsets.add(upsets::play(seed, duration)?),
        Class::Gates => tally.gates.add(gates::play(seed, duration)?),
        Class::Drops => {
            let dropped_max = arguments.dropped_futures - tally.drops.dropped();
            tally.drops.add(drops::play(seed, duration, dropped_max)?);
        }
        Class::Kept => tally.kept.add(kept::play(seed, duration)?),
        _ => {
            let begun = met::cpu_time();
            let (calls, events) = play(class, seed, arguments)?;
            tally.calls += calls;
            tally.met.add(class, met::cpu_time().saturating_sub(begun), &events);
        }
    }
    Ok(())
}

fn tell(first: u64, tally: &Tally, elapsed: Duration) {
    let last = first + tally.scenes.max(1) - 1;
    let a_second = |count: u64| count as f64 / elapsed.as_secs_f64();
    tally.met.tell();
    let kills = &tally.kills;
    if kills.kills + kills.ends > 0 {
        println!(
            "torture: {} kills, {:.1} a second, {} orderly ends; {} changes, {} syncs judged",
            kills.kills,
            a_second(kills.kills),
            kills.ends,
            kills.changes,
            kills.syncs
        );
    }
    tally.power.tell(elapsed);
    if tally.operations > 0 {
        let (made, rate) = (tally.operations, a_second(tally.operations));
        println!("torture: {made} operations of the exerciser, {rate:.0} a second");
    }
    if tally.upsets.cases > 0 {
        let upsets::Tally { cases, steps, struck, refused } = tally.upsets;
        println!(
            "torture: {cases} upset cases of {steps} steps: {struck} faults struck, {refused} \
             operations were refused"
        );
    }
    if tally.gates.writes > 0 {
        let gates::Tally { writes, syncs, words } = tally.gates;
        println!(
            "torture: {writes} writes with an LSN, {syncs} syncs, {words} words judged on the way \
             to the storage"
        );
    }
    if tally.drops.calls > 0 {
        tally.drops.tell(elapsed);
    }
    if tally.kept.opens > 0 {
        let kept::Tally { opens, found, changes } = tally.kept;
        println!(
            "torture: {opens} opens of files that changed {changes} times; {found} found all pages"
        );
    }
    println!(
        "torture: {} scenes, seeds {first} to {last}, {} calls, {:.0} calls a second: clean",
        tally.scenes,
        tally.calls,
        a_second(tally.calls)
    );
}

/// Runs the threads of a scene, and judges the result. Returns the number of calls, and the events
/// that it met.
fn play(class: Class, seed: u64, arguments: &Arguments) -> Result<(u64, Counts), Violation> {
    watchdog::enter("the setup");
    let scene = Scene::new(class, seed, arguments.threads)
        .map_err(|error| Violation(format!("the scene cannot be set up: {error:#}")))?;
    play_out(&scene, arguments).inspect_err(note_drop)?;
    let calls = scene.calls.load(Ordering::Relaxed);
    let events = met::events(&scene.cache.stats(), &scene.seen);
    rest(scene)?;
    Ok((calls, events))
}

/// Notes that a scene is dropped after a violation, which may hang: then both are told.
fn note_drop(Violation(told): &Violation) {
    watchdog::enter(&format!("the drop of the scene after a violation: {told}"));
}

/// Runs the threads of a scene.
fn play_out(scene: &Scene, arguments: &Arguments) -> Result<(), Violation> {
    watchdog::enter("the calls");
    scene.set_refusals(true);
    thread::scope(|scope| {
        let start = |number: usize| {
            let random = fastrand::Rng::with_seed(scene.seed.wrapping_mul(31) + number as u64);
            scope.spawn(move || {
                let outcome = Worker { scene, number, random, held: None, meeting: None }.run();
                if outcome.is_err() {
                    scene.ends.store(true, Ordering::Relaxed);
                }
                outcome
            })
        };
        let workers: Vec<_> = (0..scene.threads).map(start).collect();
        let watched = watch(scene, arguments, || workers.iter().all(|worker| worker.is_finished()));
        let outcomes = workers.into_iter().map(|worker| match worker.join() {
            Ok(outcome) => outcome,
            Err(_) => Err(Violation("a thread panicked".into())),
        });
        outcomes.collect::<Result<Vec<_>, _>>()?;
        watched
    })
}

/// Ends the scene in time; checks the bound and that a hung device blocks no other, and fills
/// devices temporarily.
fn watch(
    scene: &Scene,
    arguments: &Arguments,
    is_over: impl Fn() -> bool,
) -> Result<(), Violation> {
    let duration = Duration::from_millis(arguments.scene_ms);
    let hang = Duration::from_secs(arguments.hang_seconds);
    let begun = Instant::now();
    let mut free = Seen::new(0, begun);
    let mut turns = 0_u64;
    while !is_over() {
        thread::sleep(Duration::from_millis(10));
        turns += 1;
        let free_calls = scene.free_calls.load(Ordering::Relaxed);
        let has_hung = scene.has_hung_device();
        let is_enough = begun.elapsed() > duration && (!has_hung || free_calls >= FREE_CALLS);
        // A thread that has failed ends the scene: the others must come back to say why.
        if is_enough || scene.ends.load(Ordering::Relaxed) {
            scene.ends.store(true, Ordering::Relaxed);
            scene.set_refusals(false);
            scene.targets.iter().filter_map(|target| target.device.as_ref()).for_each(|d| d.heal());
        } else if scene.class == Class::Faults {
            for (number, target) in scene.targets.iter().enumerate() {
                let Some(device) = &target.device else { continue };
                // In some scenes one takes nothing at all: writers come to the limit.
                let is_stuck = number == 0 && scene.has_stuck_device();
                device.set_full(is_stuck || turns / 20 % 5 == 1 && !has_hung);
                let is_hung = if has_hung { number == 0 } else { turns / 10 % 13 == 5 };
                device.set_hung(!is_stuck && is_hung);
            }
        }
        let stats = scene.cache.stats();
        if stats.memory.used_bytes > stats.memory.bound_bytes.max(scene.memory_bytes * 2) {
            let told = format!(
                "{} bytes used, {} allowed",
                stats.memory.used_bytes, stats.memory.bound_bytes
            );
            return Err(Violation(told));
        }
        shares::check(&scene.cache)?;
        if stats.memory.dirty_bytes > scene.dirty_bytes_max() {
            let (found, most) = (stats.memory.dirty_bytes, scene.dirty_bytes_max());
            return Err(Violation(format!("{found} bytes are dirty, {most} may be")));
        }
        let is_ending = scene.ends.load(Ordering::Relaxed);
        if has_hung && !is_ending && free.look(free_calls, Instant::now()) > hang {
            let told = "no call returned of threads that do not use the hung device";
            watchdog::hung(&format!("{told}: {:?}", scene.cache.stats()));
        }
    }
    Ok(())
}

/// Checks, at rest, that every word is what the history allows, and durable after a sync.
fn rest(scene: Scene) -> Result<(), Violation> {
    judge_rest(&scene).inspect_err(note_drop)?;
    let (stats, resident) = (scene.cache.stats(), memory::resident_bytes());
    close(&scene).inspect_err(note_drop)?;
    let Scene { cache, targets, .. } = scene;
    watchdog::enter("the drop of the cache");
    drop(cache);
    let without = memory::resident_bytes();
    drop(targets);
    memory::check_resident(&stats, resident, without)
}

/// Checks the bytes of the files, in the cache and on their devices.
fn judge_rest(scene: &Scene) -> Result<(), Violation> {
    scene.set_refusals(false);
    let me = scene.threads;
    scene.clock.begin_call(me);
    for target in &scene.targets {
        let found = target.handles.iter().find_map(|slot| slot.lock().expect("no panic").clone());
        let Some(file) = found.or_else(|| closes::open(scene, target)) else { continue };
        watchdog::enter("the last read");
        let begun = scene.clock.tick();
        let mut bytes = vec![0xAA; file.len() as usize];
        file.read_exact_at(&mut bytes, 0)
            .map_err(|error| Violation(format!("the last read failed: {error}")))?;
        target.history.check("the last read", whole_words(&bytes), 0, begun)?;
        if scene.may_fail && scene.seed.is_multiple_of(4) {
            // Bytes that the device does not have are given up, so that it decides.
            watchdog::enter("discard_dirty");
            discard(target, &file)?;
            continue;
        }
        // A sync tells once of what failed before.
        watchdog::enter("the last sync");
        let synced = file.sync_data();
        if target.has_failed.load(Ordering::Relaxed) || scene.may_fail {
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
    let dirty = scene.cache.stats().memory.dirty_bytes;
    if dirty > 0 {
        return Err(Violation(format!("{dirty} bytes are dirty at rest, after a sync")));
    }
    Ok(())
}

/// Closes the files, and the cache unless that has just been refused.
fn close(scene: &Scene) -> Result<(), Violation> {
    // Four may have become one.
    let folio_bytes = 4 * scene.largest_folio_bytes();
    watchdog::enter("the close of the files");
    let is_closed = closes::play(scene)?;
    scene.log.lock().expect("no panic").take();
    memory::check_empty(&scene.cache, folio_bytes)?;
    shares::check_at_rest(&scene.cache)?;
    if !is_closed {
        watchdog::enter("the close of the cache");
        scene.cache.close().map_err(|error| Violation(format!("close failed: {error}")))?;
    }
    Ok(())
}

/// Discards bytes that are not on the device, and checks that the file is what the device has.
fn discard(target: &Target, file: &bifolio::File) -> Result<(), Violation> {
    let Some(device) = &target.device else { return Ok(()) };
    match file.discard_dirty() {
        Ok(_) => {}
        Err(error) if error.kind() == bifolio::ErrorKind::NotOpenedFor => {
            // Syncs may tell of what failed before.
            let _ = (file.sync_data(), file.sync_data());
        }
        Err(error) => return Err(Violation(format!("discard_dirty failed: {error}"))),
    }
    let mut bytes = vec![0xAA; file.len() as usize];
    file.read_exact_at(&mut bytes, 0)
        .map_err(|error| Violation(format!("the read after discard_dirty failed: {error}")))?;
    if device.live(0, bytes.len()) != bytes {
        return Err(Violation(format!("{file:?}: differs from the device after discard_dirty")));
    }
    Ok(())
}

fn whole_words(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len() / 8 * 8]
}
