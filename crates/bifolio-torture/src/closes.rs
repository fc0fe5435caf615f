//! Ways to close the files of a scene: with stores that the kernel does not report, and while a
//! device writes under pins of maps.

use crate::device::Device;
use crate::history::Violation;
use crate::maps::{HeldPin, stored_unseen};
use crate::scene::{Scene, Target};
use bifolio::backing::Backing;
use bifolio::{ErrorKind, File, Refusable, refuse};
use std::ops::Range;
use std::sync::Arc;

/// Page of each file that is stored to.
const PAGE: Range<u64> = 0..4096;

/// Closes all files. Returns `true` if the cache is closed, too.
pub fn play(scene: &Scene) -> Result<bool, Violation> {
    if !scene.has_maps() {
        scene.targets.iter().for_each(close);
        return Ok(false);
    }
    if close_without_checks(scene)? {
        return Ok(true);
    }
    close_under_pins(scene)?;
    Ok(false)
}

/// Stores to a page of each file, and lets the kernel refuse to report the stores while maps and
/// handles are dropped. The stored bytes are then in the cache, or, if the cache is closed, on
/// storage. Returns `true` if it is closed.
fn close_without_checks(scene: &Scene) -> Result<bool, Violation> {
    let me = scene.threads;
    scene.clock.begin_call(me);
    let files = scene.targets.iter().filter_map(|target| Some((target, open(scene, target)?)));
    let maps: Vec<_> =
        files.filter_map(|(target, file)| stored_unseen(target, &file, me)).collect();
    refuse(Refusable::Scan, 1024);
    drop(maps);
    scene.targets.iter().for_each(close);
    let closed = scene.cache.close();
    refuse(Refusable::Scan, 0);
    for target in &scene.targets {
        if closed.is_ok() {
            check_durable(scene, target, "a power cut after a close without a check")?;
        }
        let Some(file) = open(scene, target) else { continue };
        let begun = scene.clock.tick();
        let mut bytes = vec![0xAA; (PAGE.end - PAGE.start) as usize];
        let read = file.read_exact_at(&mut bytes, PAGE.start);
        read.map_err(|error| Violation(format!("a read after a close failed: {error}")))?;
        target.history.check("a read after a close without a check", &bytes, PAGE.start, begun)?;
    }
    scene.clock.end_call(me);
    Ok(closed.is_ok())
}

/// Drops maps and handles while a device still writes to a page of each file; the cache cannot be
/// closed before that ends.
fn close_under_pins(scene: &Scene) -> Result<(), Violation> {
    let files = scene.targets.iter().filter_map(|target| Some((target, open(scene, target)?)));
    let pins: Vec<_> =
        files.filter_map(|(target, file)| HeldPin::new(target, &file, PAGE)).collect();
    if pins.is_empty() {
        return Ok(());
    }
    let closed = scene.cache.close();
    scene.clock.begin_call(scene.threads);
    for mut pin in pins {
        pin.store(scene.threads);
        let target = pin.target;
        // The last handle goes with it.
        drop(pin);
        check_durable(scene, target, "a power cut after a pin")?;
    }
    scene.clock.end_call(scene.threads);
    match closed {
        Err(error) if error.kind() == ErrorKind::MapsAlive => Ok(()),
        other => Err(Violation(format!("the cache was closed under a pin of a map: {other:?}"))),
    }
}

/// Checks that the bytes stored to the page are on storage.
fn check_durable(scene: &Scene, target: &Target, what: &str) -> Result<(), Violation> {
    let Some(device) = &target.device else { return Ok(()) };
    let begun = scene.clock.tick();
    let durable = device.durable(PAGE.start, (PAGE.end - PAGE.start) as usize);
    target.history.check(what, &durable, PAGE.start, begun)
}

/// Opens a file with a device again.
pub fn open(scene: &Scene, target: &Target) -> Option<File> {
    let backing: Arc<dyn Backing> = Arc::<Device>::clone(target.device.as_ref()?);
    scene.cache.open_backing(backing, &target.options).ok()
}

fn close(target: &Target) {
    for slot in &target.handles {
        slot.lock().expect("no panic").take();
    }
}
