//! Everything in a table except folios: values, which one thread takes, the bitmap of charged
//! pages, and table pages that are freed.

use super::world::{World, left_at, model, spawn};
use crate::page::{Bitmap, Entry, HasTable, MemorySource, Table, Tables, Values};
use crate::sync::Ordering;
use std::sync::Arc;

/// Evicts page 0 and stores something that its value names.
fn evict_page_0(world: &World) {
    world.place.change();
    assert!(world.evict(0));
}

/// A value is taken once: by the thread that takes it, or by the one that fills its page. That
/// thread sees what was done to what the value names.
/// Dies with: a take that stores instead of its CAS; Relaxed in `take_value`, in `unlink`
/// (READ-E4); an insertion that stores instead of READ-I1's CAS.
#[test]
fn loom_table_a_value_is_taken_or_filled_over_once() {
    model(|| {
        let world = World::with_page_0(2);
        let taker = spawn(&world, |world| {
            // Relaxed: the exchange alone must order it.
            let seen = world.mapping.table().load(0, Ordering::Relaxed);
            let taken = seen == left_at(0) && world.mapping.take_value(0, seen);
            if taken {
                world.place.change();
            }
            taken
        });
        evict_page_0(&world);
        let filled = world.fill(0, left_at(0), 2);
        if filled {
            world.place.change();
        }
        let taken = taker.join().unwrap();
        assert!(taken != filled, "taken: {taken}, filled: {filled}");
        assert_eq!(world.entry(0).is_folio(), filled);
        assert_eq!(world.entry(0) == Entry::HOLE, taken);
    });
}

/// One of two takers of a value succeeds; a thread that sees the hole may fill the page.
/// Dies with: a take that stores instead of its CAS.
#[test]
fn loom_table_a_value_is_taken_once() {
    fn take(world: &World) -> bool {
        let taken = world.mapping.take_value(0, left_at(0));
        if taken {
            world.place.change();
        }
        taken
    }
    model(|| {
        let world = World::with_page_0(2);
        evict_page_0(&world);
        let other = spawn(&world, take);
        let taken = take(&world);
        assert!(world.fill(0, Entry::HOLE, 2));
        assert!(taken != other.join().unwrap());
    });
}

/// BITMAP-1: a thread that sees a bit set finds it by walking, whichever thread set it.
/// Dies with: `set` from the bottom up; Relaxed in `set` or in `is_set`.
#[test]
fn loom_table_a_charged_page_is_found() {
    model(|| {
        let bitmap = Arc::new(Bitmap::new(1 << 12).unwrap());
        let setter = spawn(&bitmap, |bitmap| {
            bitmap.set(100);
        });
        if bitmap.is_set(100) {
            assert_eq!(bitmap.next(0), Some(100));
        }
        if !bitmap.set(100) {
            assert_eq!(bitmap.next(3), Some(100));
        }
        setter.join().unwrap();
        assert_eq!(bitmap.next(0), Some(100));
    });
}

/// TABLE-T1..T4 against TABLE-G1..G4: what is inserted stays, and stays charged.
#[test]
fn loom_table_a_page_being_filled_is_not_freed() {
    let given = std::sync::atomic::AtomicBool::new(false);
    let given = &*Box::leak(Box::new(given));
    model(|| {
        let world = World::new(2, 0, 1);
        let filler = spawn(&world, |world| {
            let table = world.mapping.table();
            let _filling = table.fill();
            // As in reclaim: charged, and charged again if it was freed.
            table.set_charged(0);
            assert!(world.fill(0, Entry::HOLE, 1));
        });
        let pages = world.mapping.table().give_back();
        if pages > 0 {
            given.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        filler.join().unwrap();
        assert!(world.entry(0).is_folio());
        assert!(world.mapping.table().is_charged(0));
        assert_eq!(world.mapping.table().give_back(), 0);
    });
    assert!(given.load(std::sync::atomic::Ordering::Relaxed), "no run had a race");
}

/// A file of one page, and the list of tables.
#[derive(Debug)]
struct Listed {
    table: Table,
}

impl HasTable for Listed {
    fn table(&self) -> &Table {
        &self.table
    }
}

/// LISTING-K1, LISTING-K2 against LISTING-H1..H3: a table with a charged page is found by the next
/// search. Dies with: LISTING-H3 that does not check again; LISTING-K2 before LISTING-K1.
#[test]
fn loom_table_a_table_with_pages_stays_on_the_list() {
    let relisted = std::sync::atomic::AtomicU64::new(0);
    let relisted = &*Box::leak(Box::new(relisted));
    model(|| {
        let file = Arc::new(Listed {
            table: Table::new(&MemorySource::Private, 2, Values::Hints).unwrap(),
        });
        let tables = Arc::new(Tables::default());
        let charge = |file: &Arc<Listed>, tables: &Tables| {
            let _filling = file.table.fill();
            let is_new = file.table.set_charged(0);
            if is_new {
                tables.enlist(file);
            }
            is_new
        };
        assert!(charge(&file, &tables));
        let charger = {
            let (file, tables) = (Arc::clone(&file), Arc::clone(&tables));
            loom::thread::spawn(move || charge(&file, &tables))
        };
        let given = tables.give_back(1);
        let is_new = charger.join().unwrap();
        if is_new {
            relisted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        let left = u64::from(is_new) + 1 - given;
        assert_eq!(tables.give_back(1), left, "the table is not on the list");
        assert_eq!(tables.give_back(1), 0);
    });
    assert!(relisted.load(std::sync::atomic::Ordering::Relaxed) > 0, "no run had a race");
}
