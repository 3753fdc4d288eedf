//! Ranks that are threads.

/// Runs `body` on a thread for each of these, which may be groups. Returns the results in their order.
pub fn each<T: Send, R: Send>(
    of: impl IntoIterator<Item = T>,
    body: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = of.into_iter().map(|of| scope.spawn(move || body(of))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
