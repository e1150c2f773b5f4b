"""Faults in the drop-in, beside the core below it."""

from ..mutant import Mutant

FAULTS = [
    Mutant(
        "amp_C: sgd ignores scale",
        "ampkit/apex/amp_C.py",
        "inv_scale=float(scale),\n        found_inf=noop_flag.to(torch.float32),\n    )\n",
        "found_inf=noop_flag.to(torch.float32),\n    )\n",
        breaks="amp_C.multi_tensor_sgd multiplies gradients by its scale",
        tests=("apex/test_apex_amp_c.py::test_sgd_over_its_lists",),
    ),
    Mutant(
        "amp_C: adagrad's modes are swapped",
        "ampkit/apex/amp_C.py",
        "eps=eps, decoupled=mode == 1, weight_decay=weight_decay)",
        "eps=eps, decoupled=mode == 0, weight_decay=weight_decay)",
        breaks="mode 1 of amp_C's Adagrad is decoupled weight decay",
        tests=("apex/test_apex_amp_c.py",),
    ),
    Mutant(
        "amp_C: l2norm ignores the flag",
        "ampkit/apex/amp_C.py",
        "raise_flag(noop_flag, norm.isfinite().logical_not())\n    return norm, norms\n\n\ndef multi_tensor_l2norm_mp",
        "return norm, norms\n\n\ndef multi_tensor_l2norm_mp",
        breaks="a norm that is not finite sets the flag",
        tests=("apex/test_apex_amp_c.py::test_l2norm_sets_the_flag_and_its_mp_form_heeds_it",),
    ),
    Mutant(
        "scaler: stashed gradients at the new scale",
        "ampkit/apex/amp/scaler.py",
        "wanted / have, wanted / stashed_have, flag",
        "wanted / have, wanted / have, flag",
        breaks="stashed gradients have a scale of their own",
        tests=("apex/test_state.py::test_a_loss_scaler_of_ones_own",),
    ),
    Mutant(
        "opt: losses of the next iteration are refused",
        "ampkit/apex/amp/opt.py",
        "self._loss_idx = 0\n        return self._optimizer.step()",
        "return self._optimizer.step()",
        breaks="step() begins a new iteration of an optimizer of amp.init()",
        tests=("apex/test_training.py::test_the_first_api_of_apex",),
    ),
    Mutant(
        "fp16 optimizer: later backward passes at another scale",
        "ampkit/apex/fp16_utils/fp16_optimizer.py",
        "(_gradients(self.all_fp16_params), scale / before)",
        "(_gradients(self.all_fp16_params), 1.0)",
        breaks="gradients of several backward passes add up, also when the scale moved",
        tests=("apex/test_apex_fp16_utils.py::test_backward_passes_add_up",),
    ),
    Mutant(
        "fp16 optimizer: an overflow is stepped on",
        "ampkit/apex/fp16_utils/fp16_optimizer.py",
        "elif self.overflow:",
        "elif self.overflow and self.loss_scaler.dynamic:",
        breaks="an overflow skips the step at a static scale too",
        tests=("apex/test_apex_fp16_utils.py::test_an_overflow_at_a_static_scale_skips_the_step",),
    ),
    Mutant(
        "fp16 optimizer: masters are not loaded",
        "ampkit/apex/fp16_utils/fp16_optimizer.py",
        "master.copy_(value)",
        "pass",
        breaks="a checkpoint's masters are loaded",
        tests=("apex/test_apex_fp16_utils.py::test_checkpoints_load_under_weights_only_and_go_on_bit_for_bit",),
    ),
    Mutant(
        "handle: negative loss ids",
        "ampkit/apex/amp/handle.py",
        "loss_id + len(session.scalers) if -len(session.scalers) <= loss_id < 0 else loss_id",
        "loss_id",
        breaks="loss_id=-1 is the last loss scaler, as for Apex's list",
        tests=("apex/test_training.py::test_negative_loss_ids_count_from_the_end",),
    ),
]
