"""The mathematics: pure functions of tensors, usable without the rest of the package.

Owns every estimator and loss, one module per field of a method row: `group` (baselines and
scales), `batch`, `history`, `credit`, `value` (a critic's advantages, loss and health), `policy`
and `gates`, `correction`, `kl`, `reduce`, `terms`, the small rules around them: `shaping`,
`selection`, `logprob`, `mismatch`, and what learns from comparisons: `answers` (their scores),
`preference`, `reward_model`, `calibration` (health).
Refuses to own choices: which function a method uses is decided by its row, not here.

Legend: P prompts, G samples of a prompt, B sequences, T tokens, N scored positions, V vocabulary,
Q quarters of a completion, K answers to be ranked, S tokens where T is taken, M the valid of N.
Masks are bool, true where a value counts. What lies under a false mask is never looked at: it may
be NaN, in values and in gradients. Statistics are float64; results have the floating dtype of the
input, except what is a statistic itself (advantages, weights, sums, metrics), which stays float64.
"""
