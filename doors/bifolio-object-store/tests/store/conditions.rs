//! Reads with conditions: the answer of the cached store is that of the store below.

use chrono::{Duration, Utc};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt};

use crate::support::{PART, TestStore, builder, bytes, cache, put};

/// Returns what a read answers, with the kind of its error.
async fn answer(store: &dyn ObjectStore, location: &Path, options: GetOptions) -> String {
    let is_head = options.head;
    match store.get_opts(location, options).await {
        Ok(result) => {
            let (meta, range) = (result.meta.clone(), result.range.clone());
            let attributes = result.attributes.clone();
            let bytes = match is_head {
                true => Vec::new(),
                false => result.bytes().await.unwrap().to_vec(),
            };
            let sum: u64 = bytes.iter().map(|byte| u64::from(*byte)).sum();
            format!("{meta:?} {range:?} {attributes:?} {} bytes, sum {sum}", bytes.len())
        }
        Err(error) => {
            let text = format!("{error:?}");
            text.split([' ', '(', '{']).next().unwrap().to_owned()
        }
    }
}

#[tokio::test]
async fn conditions_are_answered_as_the_store_answers_them() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, 5 * PART as usize)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    let tag = store.objects.head(&location).await.unwrap().e_tag.unwrap();
    let (past, future) = (Utc::now() - Duration::hours(1), Utc::now() + Duration::hours(1));
    let none = || None::<String>;
    let tags = [None, Some(tag.clone()), Some("wrong".into()), Some("*".into())];
    let tags: Vec<_> = tags.into_iter().chain([Some(format!("wrong, {tag}"))]).collect();
    let ranges = [
        None,
        Some(GetRange::Bounded(10..20)),
        Some(GetRange::Bounded(4 * PART..9 * PART)),
        Some(GetRange::Bounded(9 * PART..10 * PART)),
        Some(GetRange::Bounded(20..20)),
        Some(GetRange::Offset(3 * PART)),
        Some(GetRange::Offset(9 * PART)),
        Some(GetRange::Suffix(7)),
        Some(GetRange::Suffix(100 * PART)),
    ];
    let mut cases = 0;
    for range in &ranges {
        for head in [false, true] {
            for if_match in &tags {
                for if_none_match in [none(), Some(tag.clone()), Some("wrong".into())] {
                    for times in [
                        (None, None),
                        (Some(past), None),
                        (Some(future), None),
                        (None, Some(past)),
                        (None, Some(future)),
                    ] {
                        let options = GetOptions::new()
                            .with_if_match(if_match.clone())
                            .with_if_none_match(if_none_match.clone())
                            .with_if_modified_since(times.0)
                            .with_if_unmodified_since(times.1)
                            .with_range(range.clone())
                            .with_head(head);
                        let inner: &InMemory = &store.objects;
                        let expected = answer(inner, &location, options.clone()).await;
                        let got = answer(&cached, &location, options.clone()).await;
                        assert_eq!(got, expected, "{options:?}");
                        cases += 1;
                    }
                }
            }
        }
    }
    assert_eq!(cases, 1350);
}

#[tokio::test]
async fn the_tag_of_an_old_version_is_refused_after_a_change() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, 100)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    let tag = cached.head(&location).await.unwrap().e_tag;
    let options = GetOptions::new().with_if_match(tag);
    let got = cached.get_opts(&location, options.clone()).await.unwrap();
    assert_eq!(got.bytes().await.unwrap(), bytes(0, 100));
    put(&store, &location, &bytes(1, 100)).await;
    let error = cached.get_opts(&location, options).await.unwrap_err();
    assert!(matches!(error, object_store::Error::Precondition { .. }), "{error}");
}
