//! The pin word (`page/pin_word.rs`): the four litmus tests of the kernel's proposal, and the rest.
//!
//! Integer properties rely on the total order of read-modify-writes on one word; `search_pin`
//! proves them for every interleaving of a narrow word. Only this file covers the weak-memory
//! properties: what is published around the word.

use super::world::{Checked, World, join_all, model, spawn};
use crate::page::{COUNT_MAX, PinWord, Put, TryGet, WriteState};
use crate::sync::{AtomicU32, Ordering};
use std::sync::Arc;

/// A word, and the data that its references protect.
#[derive(Debug, Default)]
struct Pinned {
    pin: PinWord,
    content: Checked,
}

fn frozen() -> Arc<Pinned> {
    let pinned = Arc::new(Pinned::default());
    pinned.pin.init_free();
    pinned
}

fn live(references: u64) -> Arc<Pinned> {
    let pinned = frozen();
    pinned.pin.init(references);
    pinned
}

fn is_got(outcome: TryGet) -> bool {
    outcome == TryGet::Got
}

/// Litmus 1: of two puts of two references exactly one is the last.
/// Dies with: a put that loads and stores instead of one read-modify-write (PIN-A4).
#[test]
fn loom_pin_litmus_free_free() {
    model(|| {
        let word = live(2);
        let other = spawn(&word, |word| word.pin.put_and_test(1) == Put::Last);
        let freed = word.pin.put_and_test(1) == Put::Last;
        assert!(freed != other.join().unwrap());
        assert!(word.pin.state().is_frozen());
    });
}

/// Litmus 2: of a put of the only reference and a get exactly one succeeds.
/// Dies with: `put_cold` freeing without its CAS.
#[test]
fn loom_pin_litmus_inc_free() {
    model(|| {
        let word = live(1);
        let getter = spawn(&word, |word| is_got(word.pin.try_get(1)));
        let freed = word.pin.put_and_test(1) == Put::Last;
        let got = getter.join().unwrap();
        assert!(freed != got);
        assert_eq!(word.pin.state().is_frozen(), freed);
        assert_eq!(word.pin.state().count(), u64::from(got));
    });
}

/// Litmus 3, with the results of both: exactly one of a freeze of all references and a get
/// succeeds. Dies with: `try_freeze` storing after its load instead of a CAS.
#[test]
fn loom_pin_litmus_inc_freeze() {
    model(|| {
        let word = live(3);
        let getter = spawn(&word, |word| is_got(word.pin.try_get(1)));
        let froze = word.pin.try_freeze(3);
        let got = getter.join().unwrap();
        assert!(froze != got);
        assert_eq!(word.pin.state().count(), if got { 4 } else { 0 });
    });
}

/// Litmus 4: a get against an unfreeze fails, or is counted.
/// Dies with: a failed get that subtracts what it added.
#[test]
fn loom_pin_litmus_inc_unfreeze() {
    model(|| {
        let word = frozen();
        let getter = spawn(&word, |word| is_got(word.pin.try_get(1)));
        word.pin.unfreeze(3);
        let got = getter.join().unwrap();
        assert_eq!(word.pin.state().count(), 3 + u64::from(got));
    });
}

/// R1: two puts and a get on two references: one free, or as many references as gets.
/// Dies with: `put_cold` freeing without its CAS.
#[test]
fn loom_pin_r1_two_puts_and_a_get() {
    model(|| {
        let word = live(2);
        let put = spawn(&word, |word| word.pin.put_and_test(1) == Put::Last);
        let getter = spawn(&word, |word| is_got(word.pin.try_get(1)));
        let freed = word.pin.put_and_test(1) == Put::Last;
        let freed = u64::from(freed) + u64::from(put.join().unwrap());
        let got = u64::from(getter.join().unwrap());
        assert_eq!(freed, 1 - got);
        assert_eq!(word.pin.state().count(), got);
        assert_eq!(word.pin.state().is_frozen(), freed == 1);
    });
}

/// R2: the free is ordered after all accesses of a thread that got and put in between.
/// Dies with: Relaxed in the CAS of `put_cold` (PIN-A5), Relaxed in `put_and_test` (PIN-A4).
#[test]
fn loom_pin_r2_the_last_put_is_ordered_after_a_rescuer() {
    model(|| {
        let world = World::new(1, 0, 1);
        let id = world.allocate(0).into_id();
        let rescuer = spawn(&world, move |world| {
            let Ok(folio) = world.folios.try_get(id) else { return };
            world.frame(folio.id()).content.look();
        });
        drop(world.folios.adopt(id));
        rescuer.join().unwrap();
        assert_eq!(world.free_frames(), 1);
    });
}

/// R3: of two freezes at most one succeeds; here exactly one.
/// Dies with: `try_freeze` storing after its load instead of a CAS.
#[test]
fn loom_pin_r3_two_freezes() {
    model(|| {
        let word = live(2);
        let other = spawn(&word, |word| word.pin.try_freeze(2));
        let froze = word.pin.try_freeze(2);
        assert!(froze != other.join().unwrap());
    });
}

/// R4: a freeze succeeds only after the other thread's put, and then sees what that thread did.
/// Dies with: Relaxed in the CAS of `try_freeze` (PIN-B1), Relaxed in `put_and_test` (PIN-A4).
#[test]
fn loom_pin_r4_a_freeze_follows_the_other_put() {
    model(|| {
        let word = live(2);
        let other = spawn(&word, |word| {
            word.content.change();
            assert_eq!(word.pin.put_and_test(1), Put::Done);
        });
        let froze = word.pin.try_freeze(1);
        if froze {
            word.content.change();
        }
        other.join().unwrap();
        assert_eq!(word.pin.state().is_frozen(), froze);
        assert_eq!(word.pin.state().count(), u64::from(!froze));
    });
}

/// R5: a get after a freeze sees what was done while frozen.
/// Dies with: Relaxed in `unfreeze` (PIN-B3), `try_get` (PIN-A2), `put_and_test` (PIN-A4),
/// `try_freeze` (PIN-B1).
#[test]
fn loom_pin_r5_unfreeze_publishes_to_getters() {
    model(|| {
        let word = live(1);
        let get_check_put = |word: &Pinned| {
            if is_got(word.pin.try_get(1)) {
                word.content.look();
                assert_eq!(word.pin.put_and_test(1), Put::Done);
            }
        };
        let getters = [spawn(&word, get_check_put), spawn(&word, get_check_put)];
        if word.pin.try_freeze(1) {
            word.content.change();
            word.pin.unfreeze(1);
        }
        join_all(getters);
        assert_eq!(word.pin.state().count(), 1);
    });
}

/// R5 for the next generation: a get sees the folio set up.
/// Dies with: Relaxed in `init` (PIN-B5), Relaxed in `try_get` (PIN-A2).
#[test]
fn loom_pin_r5_init_publishes_to_getters() {
    model(|| {
        let word = frozen();
        let getter = spawn(&word, |word| {
            if is_got(word.pin.try_get(1)) {
                word.content.look();
            }
        });
        word.content.change();
        word.pin.init(1);
        getter.join().unwrap();
    });
}

/// R6: a failed get's wipe never undoes an unfreeze, nor hides a get that succeeded.
/// Dies with: a wipe (PIN-A3) that stores, or subtracts, instead of its CAS.
#[test]
fn loom_pin_r6_unfreeze_against_wiping() {
    model(|| {
        let word = frozen();
        let get = |word: &Pinned| u64::from(is_got(word.pin.try_get(1)));
        let getters = [spawn(&word, get), spawn(&word, get)];
        word.pin.unfreeze(2);
        let got: u64 = join_all(getters).into_iter().sum();
        assert!(!word.pin.state().is_frozen());
        assert_eq!(word.pin.state().count(), 2 + got);
    });
}

/// R7: a late wipe, of a word that was frozen again or is in its next generation, changes no count.
/// Dies with: a wipe (PIN-A3) that stores instead of its CAS.
#[test]
fn loom_pin_r7_a_late_wipe_changes_no_later_word() {
    model(|| {
        let word = frozen();
        let getter = spawn(&word, |word| u64::from(is_got(word.pin.try_get(2))));
        word.pin.unfreeze(1);
        let refrozen = word.pin.try_freeze(1);
        if refrozen {
            word.pin.init(3);
        }
        let got = 2 * getter.join().unwrap();
        let references = if refrozen { 3 } else { 1 };
        assert!(!word.pin.state().is_frozen());
        assert_eq!(word.pin.state().count(), references + got);
    });
}

/// R8: a put that paused between its subtraction and its CAS does not win a later generation.
/// Dies with: `init` keeping the generation.
#[test]
fn loom_pin_r8_a_put_of_an_old_generation_frees_nothing() {
    model(|| {
        let word = live(1);
        let rescuer = spawn(&word, |word| {
            if !is_got(word.pin.try_get(1)) || word.pin.put_and_test(1) == Put::Done {
                return false;
            }
            word.pin.init(1);
            assert_eq!(word.pin.put_and_test(1), Put::Last, "freed by a put of the old generation");
            true
        });
        let freed_first = word.pin.put_and_test(1) == Put::Last;
        let freed_second = rescuer.join().unwrap();
        assert!(freed_first != freed_second);
        assert!(word.pin.state().is_frozen());
    });
}

/// R10: at the limit one of two gets is refused, the count is exact and nothing looks frozen.
/// Dies with: a refusal that keeps what it added; the limit left out of `NOT_GOT`.
#[test]
fn loom_pin_r10_the_limit_refuses() {
    model(|| {
        let word = live(COUNT_MAX - 1);
        let other = spawn(&word, |word| word.pin.try_get(1));
        let watcher = spawn(&word, |word| assert!(!word.pin.state().is_frozen()));
        let outcomes = [word.pin.try_get(1), other.join().unwrap()];
        watcher.join().unwrap();
        assert!(outcomes.contains(&TryGet::Got) && outcomes.contains(&TryGet::Refused));
        assert_eq!(word.pin.state().count(), COUNT_MAX);
    });
}

/// R13: get, dirty, put against freeze, then the dirty test: no dirty mark is missed.
/// Dies with: Relaxed in the CAS of `try_freeze` (PIN-B1), in `put_and_test` (PIN-A4).
#[test]
fn loom_pin_r13_the_dirty_test_after_the_freeze_misses_nothing() {
    #[derive(Debug)]
    struct Page {
        word: Arc<Pinned>,
        dirty: AtomicU32,
    }
    model(|| {
        let page = Arc::new(Page { word: live(1), dirty: AtomicU32::new(0) });
        let writer = spawn(&page, |page| {
            let got = is_got(page.word.pin.try_get(1));
            if got {
                // Relaxed: the pin word alone must order it.
                page.dirty.store(WriteState::Dirty as u32, Ordering::Relaxed);
                assert_eq!(page.word.pin.put_and_test(1), Put::Done);
            }
            got
        });
        let froze = page.word.pin.try_freeze(1);
        let clean = froze && page.dirty.load(Ordering::Relaxed) == 0;
        if froze && !clean {
            page.word.pin.unfreeze(1);
        }
        let wrote = writer.join().unwrap();
        assert!(!(clean && wrote), "freed a dirty folio");
    });
}
