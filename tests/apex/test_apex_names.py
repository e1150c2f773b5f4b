"""The neighbours of amp are found by the names that scripts import them by."""

import importlib

import pytest

NAMES = {
    "apex.amp.__version__": "VERSION __version__",
    "apex.parallel": "DistributedDataParallel Reducer ReduceOp SyncBatchNorm convert_syncbn_model create_syncbn_process_group",
    "apex.parallel.distributed": "DistributedDataParallel Reducer flat_dist_call split_half_float_double",
    "apex.parallel.LARC": "LARC",
    "apex.parallel.multiproc": "main",
    "apex.parallel.sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.optimized_sync_batchnorm": "SyncBatchNorm",
    "apex.optimizers": "FusedAdam FusedSGD FusedLAMB FusedNovoGrad FusedAdagrad FusedMixedPrecisionLamb FusedLARS "
    "FP16_Optimizer",
    "apex.optimizers.fp16_optimizer": "FP16_Optimizer",
    "apex.optimizers.fused_adam": "FusedAdam",
    "apex.optimizers.fused_sgd": "FusedSGD",
    "apex.optimizers.fused_lamb": "FusedLAMB",
    "apex.optimizers.fused_novograd": "FusedNovoGrad",
    "apex.optimizers.fused_adagrad": "FusedAdagrad",
    "apex.optimizers.fused_lars": "FusedLARS",
    "apex.optimizers.fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "apex.contrib.optimizers": "FP16_Optimizer FusedAdam FusedSGD FusedLAMB",
    "apex.contrib.optimizers.fused_adam": "FusedAdam",
    "apex.contrib.optimizers.fused_sgd": "FusedSGD",
    "apex.contrib.optimizers.fused_lamb": "FusedLAMB",
    "apex.contrib.optimizers.fp16_optimizer": "FP16_Optimizer",
    "apex.contrib.clip_grad": "clip_grad_norm_",
    "apex.contrib.clip_grad.clip_grad": "clip_grad_norm_",
    "apex.fp16_utils": "BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads FP16Model tofp16 "
    "master_params_to_model_params to_python_float clip_grad_norm convert_module convert_network FP16_Optimizer LossScaler "
    "DynamicLossScaler",
    "apex.fp16_utils.fp16util": "BN_convert_float network_to_half tofp16 to_python_float clip_grad_norm",
    "apex.fp16_utils.loss_scaler": "LossScaler DynamicLossScaler",
    "apex.fp16_utils.fp16_optimizer": "FP16_Optimizer",
    "apex.normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "apex.normalization.fused_layer_norm": "FusedLayerNorm fused_layer_norm fused_layer_norm_affine fused_rms_norm "
    "fused_rms_norm_affine mixed_dtype_fused_layer_norm_affine mixed_dtype_fused_rms_norm_affine manual_rms_norm "
    "FusedLayerNormAffineFunction FusedRMSNormAffineFunction",
    "apex.multi_tensor_apply": "multi_tensor_applier MultiTensorApply",
    "apex.multi_tensor_apply.multi_tensor_apply": "MultiTensorApply",
    "amp_C": "multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm multi_tensor_l2norm_mp multi_tensor_l2norm_scale "
    "multi_tensor_unscale_l2norm multi_tensor_sgd multi_tensor_adam multi_tensor_adam_capturable "
    "multi_tensor_adam_capturable_master multi_tensor_adagrad multi_tensor_novograd multi_tensor_lamb multi_tensor_lamb_mp "
    "multi_tensor_lamb_stage1_cuda multi_tensor_lamb_stage2_cuda multi_tensor_lars update_scale_hysteresis",
    "apex_C": "flatten unflatten",
    "fused_adam_cuda": "adam",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_are_found_where_scripts_import_them(module):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_star_imports_of_fp16_utils_bring_everything():
    namespace = {}
    exec("from apex.fp16_utils import *", namespace)
    assert set(NAMES["apex.fp16_utils"].split()) <= namespace.keys()


# In apex.contrib amp imported the optimizers; the rest has to be imported by its name.
ATTRIBUTES = [name for name in NAMES if name.startswith("apex.") and not name.startswith("apex.contrib.clip_grad")]


@pytest.mark.parametrize("module", ATTRIBUTES)
def test_modules_are_attributes_of_apex(module):
    import apex

    found = apex
    for name in module.split(".")[1:]:
        found = getattr(found, name)
    assert found is importlib.import_module(module)
